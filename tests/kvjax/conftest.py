import jax
import pytest

SLOW_TO_RUN = ("test_real_model.py", "test_reference.py")
"""Of real models: fast code is worth its compilation there."""


@pytest.fixture(autouse=True, scope="module")
def programs_compile_fast(request):
    """Programs of tiny models run a few times: compiling them is most of what their tests take."""
    name = request.path.name
    if name in SLOW_TO_RUN or "tpu" in name:
        yield
        return
    compile_as_told = jax.stages.Lowered.compile

    def compile_fast(lowered, compiler_options=None, **options):
        given = compiler_options or {"xla_backend_optimization_level": 0}
        return compile_as_told(lowered, given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_fast)
        yield
