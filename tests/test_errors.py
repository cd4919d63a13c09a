"""Errors cross pipes between processes and end as answers to clients."""

import copy
import pickle

import pytest

from vllm_omni import errors
from vllm_omni.entrypoints.server.http_errors import error_response
from vllm_omni.errors import InternalError, InvalidRequestError, OmniError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

CLASSES = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, OmniError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("duplicate", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_says_the_same(kind, duplicate):
    twin = duplicate(kind("what was got"))
    assert type(twin) is kind
    assert str(twin) == str(kind("what was got"))


def test_a_copy_keeps_the_field():
    error = InvalidRequestError("must be odd", field="seed")
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.field) == ("seed: must be odd", "seed")


def test_every_class_is_in_the_drawing():
    for kind in CLASSES:
        assert kind.__name__ in errors.__doc__


def test_our_own_bugs_are_not_blamed_on_the_client():
    error = InternalError("chunk 3 was asked for after chunk 1")
    assert not isinstance(error, ValueError)
    assert error_response(error).status_code == 500
