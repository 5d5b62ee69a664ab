"""The network of these tests, and the cluster."""

from __future__ import annotations

import pathlib
import secrets
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests import fresh
from tests.ray.networks import PATIENCE, save_network


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_network(tmp_path_factory.mktemp("network") / "small.escalade")


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """A cluster of this machine with two CPUs, whose workers can import these tests; it ends with them.

    Its files, including its clients' token, are in a separate folder with a short name, since socket paths are
    limited.
    """
    ray = pytest.importorskip("ray")
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        token = pathlib.Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.delenv("RAY_AUTH_MODE")  # Ray sets it if it finds a token, and the patch restores it
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(fresh.ROOT))
        context = ray.init(
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )
        try:
            yield context.address_info["address"]
        finally:
            ray.shutdown()


@pytest.fixture
def patience() -> Iterator[None]:
    """Fail instead of waiting forever."""

    def stop(*_: object) -> None:
        raise TimeoutError("Ray does not get on")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
