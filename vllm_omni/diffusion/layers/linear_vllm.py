"""The layers of :mod:`linear` on vLLM's parallel linears, imported only when they are chosen."""
