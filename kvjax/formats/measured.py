"""What a format was calibrated for must be what it is used for."""

from kvjax.errors import KvjaxError


def check_measured(what: str, kind: str, given: int, measured: int) -> None:
    """Refuse pages of another shape than were calibrated.

    Args:
      what: "keys" or "values", for the message.
      kind: which axis it is.
      given: its size in the pages.
      measured: its size in the calibration.

    Raises:
      KvjaxError: they differ.
    """
    if given != measured:
        raise KvjaxError(
            f"{what} have {given} {kind}, and the calibration is of {measured}: calibrate this "
            f"model"
        )
