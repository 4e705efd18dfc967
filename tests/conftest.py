"""What several test modules share."""

import pytest

from fa4_jax import bundle


@pytest.fixture(scope="session")
def built_library():
    """The native library with every target registered; skips where `make build` has not run."""
    try:
        bundle.directory()
    except bundle.BundleError as error:
        pytest.skip(str(error))
    return bundle.library()
