"""Serialization: values by any pickler that can, exceptions with their class or the nearest base class."""

import threading

import pytest

from loopwright.rollouts.pools.base import SerializationError
from loopwright.rollouts.pools.serialization import pack, pack_exception, unpack, unpack_exception
from loopwright.testing.pools import Trouble


class Closed(OSError):
    """An exception with an attribute that cannot be sent."""

    def __init__(self, lock, name):
        super().__init__(f"{name} is closed")
        self.lock, self.name = lock, name


class BrokenMessage(ValueError):
    def __str__(self):
        return f"needs {self.nowhere}"


def round_trip(error):
    try:
        raise error
    except Exception as raised:  # noqa: BLE001
        return unpack_exception(unpack(pack(pack_exception(raised))), "a test")


@pytest.mark.parametrize("error", [KeyError("x"), OSError(2, "gone", "file"), ExceptionGroup("two", [ValueError("1")])])
def test_l01_builtin_exceptions_arrive_equal(error):
    received = round_trip(error)
    assert (type(received), str(received), repr(received)) == (type(error), str(error), repr(error))
    assert "raised in a test" in received.__notes__[0]


def test_l01_a_constructor_with_other_arguments_does_not_matter():
    received = round_trip(Trouble(7, "no luck"))
    assert (type(received), str(received), received.code) == (Trouble, "no luck (7)", 7)


def test_l01_attributes_that_cannot_be_sent_are_dropped():
    received = round_trip(Closed(threading.Lock(), "file"))
    assert (type(received), str(received), received.name) == (Closed, "file is closed", "file")
    assert not hasattr(received, "lock")


def test_l01_a_class_that_cannot_be_imported_becomes_its_nearest_base():
    class Hidden(LookupError):
        def __init__(self):
            super().__init__("nothing")
            self.lock = threading.Lock()

    received = round_trip(Hidden())
    assert type(received) is LookupError
    assert str(received).endswith("Hidden: nothing")


def test_l01_a_failing_str_hides_only_the_message():
    assert isinstance(round_trip(BrokenMessage()), ValueError)


def test_values_that_only_cloudpickle_can_send_are_sent():
    assert unpack(pack(lambda x: x + 1))(1) == 2
    with pytest.raises(SerializationError, match="a request of type lock cannot be sent to another process"):
        pack(threading.Lock())
