"""Accuracy of quantised attention: the report of `python -m fa4_jax accuracy`, from a checkout."""

from fa4_jax import accuracy

if __name__ == "__main__":
    raise SystemExit(accuracy.main())
