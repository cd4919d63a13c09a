"""What a GPU would run, compiled for it or interpreted on the CPU, with Triton and no GPU."""
