"""Variables with which JAX compiles quickly; the programs are slower. Does not import JAX."""

from importlib.metadata import version

# Without the emitters of fused loops most programs compile in half the time. A jaxlib that does not
# know a flag ends the process, so this one is for the versions in which it was tried.
IS_KNOWN = (0, 7) <= tuple(map(int, version("jaxlib").split(".")[:2])) <= (0, 10)
QUICK = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": " --xla_cpu_use_fusion_emitters=false" if IS_KNOWN else "",
}
