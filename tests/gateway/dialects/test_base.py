"""BodyReader: reading only what is new of one gives what reading all of it gives, whatever came before."""

import json
from hashlib import blake2b

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.gateway.dialects import base as module
from loopwright.gateway.dialects.base import BodyReader, parse_object
from loopwright.gateway.dialects.fields import BadRequest

DIALECT = "chat.completions"


def user(text):
    return {"role": "user", "content": text}


def digest(body):
    return blake2b(body, digest_size=16, person=DIALECT.encode()).digest()


def agrees(bodies, body):
    """Reads a body; as it would be read by itself, and with the digest of all of its bytes."""
    told, found = bodies.read(body)
    bodies.keep()
    assert told == orjson.loads(body)
    assert found == digest(body)
    return told


def alone(body):
    return parse_object(body), digest(body)


def outcome(read, body):
    try:
        return read(body)
    except BadRequest as error:
        return str(error)


texts = st.text() | st.sampled_from(['"', "\\", '}],"', '"}]', "]}", '{"role":"user"}', "\\u005d", "ü}", "[", "{"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
messages = st.dictionaries(texts, values, max_size=3) | values
fields = st.dictionaries(st.sampled_from(["model", "stop", "tools", "input", "messages", "n"]), values, max_size=3)


@st.composite
def conversations(draw):
    """BodyReader of which each repeats some of what came before it, in one of several spellings."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]))
    name, head = draw(st.sampled_from(["messages", "input"])), draw(fields)
    said, found = [], []
    for _ in range(draw(st.integers(1, 5))):
        said = said[: draw(st.integers(0, len(said)))] if draw(st.integers(0, 3)) == 0 else said
        said = [*said, *draw(st.lists(messages, max_size=3))]
        whole = {**head, name: said, **draw(fields)}
        found.append(json.dumps(whole, separators=separators, ensure_ascii=draw(st.booleans())).encode())
    return found


@given(conversations())
def test_t02_a_body_is_read_as_if_it_were_the_first(found):
    bodies = BodyReader(DIALECT)
    for body in found:
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError:  # half a surrogate pair
            with pytest.raises(BadRequest):
                bodies.read(body)
        else:
            agrees(bodies, body)


@given(conversations(), st.data())
def test_t02_invalid_json_is_refused_whatever_came_before(found, data):
    bodies = BodyReader(DIALECT)
    for body in found:
        place = data.draw(st.integers(0, len(body)))
        broken = (
            body[:place]
            + data.draw(st.sampled_from([b"", b",", b"]", b"}", b'"', b"\\", b"{", b"\xff"]))
            + body[place + 1 :]
        )
        for each in (body, broken):
            # The error, too: it names its place in the whole body.
            assert outcome(bodies.read, each) == outcome(alone, each)


@pytest.mark.parametrize(
    "added",
    [
        b',{"b":2}', b' , {"b":{"c":[{}]}}', b'{"b":2}', b',,{"b":2}', b',{"b":2},', b',{"b":2}]', b',"b}"', b",2",
        b',{"b":2}],"x":[{"c":3}', b',{"b":2}],"messages":[{"c":3}', b'],"messages":[{"c":3}',
        b',{"b":"}],\\"n\\":1}"}', b',{"b":"}', b"", b',{"b":2}],"n":1},{"messages":[{"c":3}',
    ],
)  # fmt: skip
def test_t02_a_body_that_ends_like_the_one_before_it_is_read_as_if_it_were_the_first(added):
    bodies = BodyReader(DIALECT)
    agrees(bodies, b'{"messages":[{"a":1}],"n":1}')
    body = b'{"messages":[{"a":1}%b],"n":1}' % added
    assert outcome(bodies.read, body) == outcome(alone, body)
    bodies.keep()
    longer = body.replace(b'],"n":1}', b',{"d":4}],"n":1}')
    assert outcome(bodies.read, longer) == outcome(alone, longer)


def test_what_was_read_before_is_not_read_again(monkeypatch):
    bodies, said = BodyReader(DIALECT), [user("long " * 1000)]
    agrees(bodies, orjson.dumps({"model": "m", "messages": said}))
    read, loads = [], orjson.loads

    class Counting:
        JSONDecodeError, loads = (
            orjson.JSONDecodeError,
            staticmethod(lambda data: (read.append(len(data)), loads(data))[1]),
        )

    for turn in range(3):
        said = [*said, user(f"turn {turn}")]
        body = orjson.dumps({"model": "m", "messages": said, "stream": True})
        with monkeypatch.context() as patch:
            patch.setattr(module, "orjson", Counting)
            told, found = bodies.read(body)
            bodies.keep()
        assert (told, found) == (loads(body), digest(body))
        assert sum(read) < 200, "a turn costs what is new"
        read.clear()


def test_conversations_that_take_turns_are_all_known():
    bodies = BodyReader(DIALECT)
    said = {name: [user(name)] for name in "abc"}
    for _ in range(3):
        for name in said:
            said[name].append(user(name))
            agrees(bodies, orjson.dumps({"messages": said[name]}))
    assert [begun.items[0]["content"] for begun in bodies._prefixes] == ["c", "b", "a"]


@pytest.mark.parametrize(
    "rest",
    [
        b'],"messages":[{"role":"user","content":"other"}]}',
        b'],"\\u006dessages":[]}',
        b',{"role":"user"}],"messages":[1]}',
        b',{"role":"user"}],"model":"other","model":"last"}',
        b',"text",5]}',
        b' \r\n\t,\n{"a":{"b":[{}]}} ] \n , "n":1 } ',
    ],
)
def test_t02_equal_bytes_with_another_meaning_are_told_apart(rest):
    """A second list replaces the first one, and a field that is given twice has its last value."""
    bodies, begun = BodyReader(DIALECT), b'{"model":"first","messages":[{"role":"user","content":"}],"}'
    agrees(bodies, begun + b"]}")
    agrees(bodies, begun + rest)
    agrees(bodies, begun + b"]}")


@pytest.mark.parametrize("rest", [b",]}", b' {"role":"user"}]}', b",", b"", b"]", b"}]}", b"]}{", b",1,]}", b"]]}"])
def test_a_rest_that_is_not_json_is_refused(rest):
    bodies, begun = BodyReader(DIALECT), b'{"messages":[{"role":"user"}'
    agrees(bodies, begun + b"]}")
    with pytest.raises(BadRequest, match=r"not valid JSON|not a JSON object"):
        bodies.read(begun + rest)


@pytest.mark.parametrize("body", [b"[]", b"5", b'"messages"', b"null"])
def test_a_body_is_an_object(body):
    with pytest.raises(BadRequest, match="not a JSON object"):
        BodyReader(DIALECT).read(body)


def test_a_body_of_strings_that_never_end_is_refused_at_once():
    """Looking for the end from each of their quotes would take hours."""
    with pytest.raises(BadRequest, match=r"not valid JSON|not a JSON object"):
        BodyReader(DIALECT).read(b'{"a":"' + b'\\"' * 10**6)


def test_dialects_have_digests_of_their_own():
    body = b'{"messages":[{}]}'
    assert BodyReader("a").read(body)[1] != BodyReader("b").read(body)[1]
