"""The verbs: wiring only. Each module has one `run`; no verb imports another."""
