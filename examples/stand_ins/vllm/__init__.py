"""Stands in for the pictures of vLLM where vLLM is not installed, for programs that ask it for one.

PYTHONPATH=examples/stand_ins python benchmark_lingbot_world_realtime.py --port 8000
"""
