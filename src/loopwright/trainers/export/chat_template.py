"""The Jinja form of a family's chat template, for a policy whose model has no template."""

import json

from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.sessions.template import FamilyTemplate

_ROLE, _TEXT, _TOOL = "ROLE", "TEXT", {"name": "TOOL"}
_JINJA = """\
{%%- set ns = namespace(tools="", text="") -%%}
{%%- if tools -%%}
  {%%- for tool in tools -%%}
    {%%- set ns.tools = ns.tools ~ ("" if loop.first else "\\n") ~ (tool | tojson(separators=(",", ":"))) -%%}
  {%%- endfor -%%}
  {%%- set ns.tools = %(tools_before)s ~ ns.tools ~ %(tools_after)s -%%}
{%%- endif -%%}
{{- %(start)s -}}
{%%- if tools and messages[0].role != "system" -%%}
  {{- %(before)s ~ "system" ~ %(between)s ~ ns.tools ~ %(after)s -}}
{%%- endif -%%}
{%%- for message in messages -%%}
  {%%- if message.content is string -%%}{%%- set ns.text = message.content -%%}
  {%%- else -%%}{%%- set ns.text = (message.content or []) | map(attribute="text") | join("") -%%}{%%- endif -%%}
  {%%- if tools and loop.first and message.role == "system" -%%}
    {%%- set ns.text = ns.text ~ "\\n\\n" ~ ns.tools -%%}
  {%%- endif -%%}
  {%%- if message.reasoning_content -%%}
    {%%- set ns.text = "<think>\\n" ~ message.reasoning_content ~ "\\n</think>\\n\\n" ~ ns.text -%%}
  {%%- endif -%%}
  {%%- for call in message.tool_calls or [] -%%}
    {%%- set arguments = call.function.arguments or {} -%%}
    {%%- set ns.text = ns.text ~ (%(gap)s if %(has_close)s or (loop.first and ns.text) else "" if loop.first else "; ")
        ~ %(call_before)s ~ (call.function.name | tojson) ~ %(call_between)s
        ~ (arguments if arguments is string else arguments | tojson) ~ %(call_after)s -%%}
  {%%- endfor -%%}
  {{- %(before)s ~ %(roles)s.get(message.role, message.role) ~ %(between)s ~ ns.text ~ %(after)s -}}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}{{- %(opening)s -}}{%%- endif -%%}
"""


def jinja_of(template: FamilyTemplate, tokenizer: Tokenizer) -> str:
    """A Jinja template that writes conversations as this one does. Its parts are cut from what it renders."""
    frame = tokenizer.decode(template.render({"role": _ROLE, "content": _TEXT}, first=False, tools=()))
    before, _, rest = frame.partition(_ROLE)
    between, _, after = rest.partition(_TEXT)
    system = tokenizer.decode(template.render({"role": "system", "content": _TEXT}, first=True, tools=(_TOOL,)))
    description = system.partition(f"{_TEXT}\n\n")[2].removesuffix(after)
    tools_before, _, tools_after = description.partition(json.dumps(_TOOL, separators=(",", ":")))
    call_before, _, rest = template.grammar.write(_ROLE, {}).partition(json.dumps(_ROLE))
    call_between, _, call_after = rest.partition("{}")
    texts = {
        "start": tokenizer.decode(template.plain("")),
        "before": before,
        "between": between,
        "after": after,
        "tools_before": tools_before,
        "tools_after": tools_after,
        "call_before": call_before,
        "call_between": call_between,
        "call_after": call_after,
        "gap": "\n",
        "has_close": bool(template.grammar.close),
        "roles": dict(template.role_names),
        "opening": tokenizer.decode(template.opening()),
    }
    return _JINJA % {name: json.dumps(text, ensure_ascii=False) for name, text in texts.items()}
