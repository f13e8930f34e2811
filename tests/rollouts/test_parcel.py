"""Parcels: values by any pickler that can, exceptions as themselves or as the nearest that can be made."""

import threading

import pytest

from loopwright.rollouts.pools.base import SerializationError
from loopwright.rollouts.pools.parcel import pack, pack_exception, unpack, unpack_exception
from loopwright.testing.pools import Trouble


class Closed(OSError):
    """Holds something that cannot be sent."""

    def __init__(self, lock, name):
        super().__init__(f"{name} is closed")
        self.lock, self.name = lock, name


class Picky(ValueError):
    def __str__(self):
        return f"needs {self.nowhere}"


def sent(error):
    try:
        raise error
    except Exception as raised:  # noqa: BLE001
        return unpack_exception(unpack(pack(pack_exception(raised))), "a test")


@pytest.mark.parametrize("error", [KeyError("x"), OSError(2, "gone", "file"), ExceptionGroup("two", [ValueError("1")])])
def test_l01_exceptions_of_the_language_arrive_equal(error):
    arrived = sent(error)
    assert (type(arrived), str(arrived), repr(arrived)) == (type(error), str(error), repr(error))
    assert "raised in a test" in arrived.__notes__[0]


def test_l01_a_constructor_with_other_arguments_does_not_matter():
    arrived = sent(Trouble(7, "no luck"))
    assert (type(arrived), str(arrived), arrived.code) == (Trouble, "no luck (7)", 7)


def test_l01_what_cannot_be_sent_stays_behind_and_the_rest_arrives():
    arrived = sent(Closed(threading.Lock(), "door"))
    assert (type(arrived), str(arrived), arrived.name) == (Closed, "door is closed", "door")
    assert not hasattr(arrived, "lock")


def test_l01_a_class_that_is_not_known_here_becomes_its_nearest_base():
    class Hidden(LookupError):
        def __init__(self):
            super().__init__("nothing")
            self.lock = threading.Lock()

    arrived = sent(Hidden())
    assert type(arrived) is LookupError
    assert str(arrived).endswith("Hidden: nothing")


def test_l01_a_message_that_fails_costs_only_itself():
    assert isinstance(sent(Picky()), ValueError)


def test_values_that_only_one_pickler_can_send_are_sent():
    assert unpack(pack(lambda x: x + 1))(1) == 2
    with pytest.raises(SerializationError, match="a request of type lock cannot be sent to another process"):
        pack(threading.Lock())
