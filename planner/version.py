"""Version numbers of the package and of the cost model."""

VERSION = "0.1.0"
MODEL_VERSION = "0.2.0"  # changes whenever the same job would be answered differently
