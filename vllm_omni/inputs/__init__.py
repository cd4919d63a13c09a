"""What users of the Python API give: prompts and sampling parameters."""
