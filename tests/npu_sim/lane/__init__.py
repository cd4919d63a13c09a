"""Checks that run in an environment with torch_npu; `make test-npu-sim` runs them."""
