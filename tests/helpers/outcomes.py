"""How requests ended, as the figures tell it."""

from vllm_omni.engine.metrics import REFUSALS, EngineMetrics

_OUTCOMES = {
    "requests_success_total": ("finished_reason", ("finished", "stopped")),
    "requests_failed_total": (
        "reason", ("client_abort", "client_disconnect", "stage_error", "unknown"),
    ),
    "requests_refused_total": ("reason", REFUSALS),
}  # fmt: skip


def outcomes(metrics: EngineMetrics, model: str) -> dict[str, float]:
    """Everything that happened, as ``"failed stage_error": 1``."""
    found = {}
    for name, (label, values) in _OUTCOMES.items():
        for value in values:
            labels = {"model_name": model, label: value}
            if count := metrics.registry.get_sample_value(f"vllm_omni:{name}", labels):
                found[f"{name.split('_')[1]} {value}"] = count
    return found
