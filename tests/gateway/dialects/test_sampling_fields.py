"""Arguments of the chat template: those that a request sets elsewhere are refused."""

import pytest

from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.dialects.sampling_fields import template_arguments


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"messages": [{"role": "user", "content": "another"}]}, "messages"),
        ({"tools": [{}], "enable_thinking": False}, "tools"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"self": 1}, "self"),
    ],
)
def test_t13_arguments_of_the_template_that_the_request_sets_are_refused_by_name(arguments, name):
    with pytest.raises(BadRequest, match=f"chat_template_kwargs.{name}: not supported"):
        template_arguments({"chat_template_kwargs": arguments})


def test_t13_neutral_arguments_of_the_template_pass():
    neutral = {"messages": [], "tools": None, "add_generation_prompt": True}
    assert template_arguments({"chat_template_kwargs": {**neutral, "date": "today"}}) == {"date": "today"}
