# Runs the demo. With a GPU (driver 580 or newer): docker run --rm --gpus all escalade
# Without one the kernels run on the CPU twin:     docker run --rm escalade
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*

# The image has a user `ubuntu` with id 1000, which hosts often use: files in mounted folders belong to the caller.
USER ubuntu
WORKDIR /home/ubuntu/escalade
COPY --chown=ubuntu:ubuntu . .
RUN make setup

CMD ["make", "demo"]
