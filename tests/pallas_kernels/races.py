"""How an interpreted TPU kernel is watched for races between its copies and its computation."""

from jax.experimental.pallas import tpu as pltpu

WATCHED = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")


def assert_no_race(capfd, function):
    """Fail on a race: newer JAX raises on one, older JAX only prints it."""
    try:
        function()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    captured = capfd.readouterr()
    printed = captured.out + captured.err
    assert "RACE DETECTED" not in printed, printed
    assert "non-zero count" not in printed, printed  # a copy nobody waited for
