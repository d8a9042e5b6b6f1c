import os

# Triton up to 3.9 fuses multiplications with additions by default, 3.10 no more: results of the
# same kernels would differ between versions. Must be set before Triton compiles anything.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
