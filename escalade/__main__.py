"""Entry point of `python -m escalade`."""

if __name__ == "__main__":  # worker processes import this file under another name
    from escalade.cli import main

    main()
