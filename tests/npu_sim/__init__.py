"""Tests on the genuine torch_npu over a simulated runtime; see docs/npu_simulation.md."""
