"""What Linux says of a processor."""

import pytest

from kvjax.pallas_kernels.cpu_flags import cpu_multiplies_bfloat16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: x\nflags\t\t: fpu avx2 avx512_bf16\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd\n", False),
    ],
)
def test_native_bfloat16_is_read_from_the_cpu(tmp_path, text, expected):
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_multiplies_bfloat16(str(tmp_path / "cpuinfo")) is expected
    assert not cpu_multiplies_bfloat16(str(tmp_path / "absent"))
