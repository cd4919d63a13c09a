"""``python -m vllm_omni`` is the ``vllm-omni`` command."""

from vllm_omni.entrypoints.cli.main import main

if __name__ == "__main__":
    main()
