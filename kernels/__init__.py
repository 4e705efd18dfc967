"""CuTe-DSL kernels of fa4_jax; needed to build the bundle, never at run time."""
