"""The contract of the HTTP API: what each request and each answer contains, written down once.

The daemon decodes requests into these Structs and encodes its answers from them, `/openapi.json` is generated from
them, and `gpuyard.Client` returns them. Keys are only ever added; `None` means unknown, never zero."""
