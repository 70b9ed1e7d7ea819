"""The embedded engine: continuous batching over a KV cache in plain torch, behind SGLang's HTTP API.

app ── control, generate ──> thread ──> scheduler ──> runner ──> weights, architecture
                                           ├── slots, sequence
                                           └── sampling, stops
"""
