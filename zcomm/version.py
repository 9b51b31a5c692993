"""The version of the package; pyproject.toml says the same (tests/test_public_names.py)."""

__version__ = "0.1.0"
