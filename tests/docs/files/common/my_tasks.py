"""Tasks that the guides name."""


def riddles() -> list[dict]:
    """Sums in words."""
    return [{"prompt": f"I have {a} apples and get 2 more. How many are there?", "label": str(a + 2)} for a in range(4)]
