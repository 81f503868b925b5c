"""Names and expressions that several dashboards have."""

from __future__ import annotations

from panels import gauge, rate, ratio, timeline

# As in rules.yml.
API = 'route=~"/(v1|v2|api)/.+|/(de)?tokenize|/rerank|/score", route!="/v1/loads"'
HTTP, ENDS = "wavefill_http_requests_total", "wavefill_requests_total"
TTFT, ITL = "wavefill_time_to_first_token_seconds", "wavefill_inter_token_latency_seconds"
E2E, TPOT = "wavefill_e2e_request_latency_seconds", "wavefill_time_per_output_token_seconds"
STEP, TOKENS = "wavefill_engine_step_seconds", "wavefill_iteration_tokens"
GENERATED, PROMPT = "wavefill_generation_tokens_total", "wavefill_prompt_tokens_total"
CACHED = "wavefill_prompt_tokens_cached_total"
ERRORS = ratio(rate(HTTP, where=f'{API}, code=~"5.."'), rate(HTTP, where=API))
STATE = timeline(
    "State of the engine",
    "Which state each engine is in: loading, ready, stalled (silent) or down. Loading after a "
    "time of readiness means that the engine died and was started again.",
    gauge("wavefill_engine_state", "instance, engine, state"),
    "{{instance}} {{engine}} {{state}}",
)
