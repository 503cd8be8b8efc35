"""Version of the cost model: changes whenever the same job would be answered differently."""

MODEL_VERSION = "0.2.0"
