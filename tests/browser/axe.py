"""What axe-core finds wrong with an element for people who use a keyboard or a screen reader."""

from __future__ import annotations

from importlib import resources

REPORTED = ("serious", "critical")


def serious(page, selector: str) -> list[str]:
    """One line for each rule that the one element at ``selector``, or what is in it, breaks seriously.

    The element must be there and seen: axe finds no fault with what is hidden, and neither would the test.
    """
    element = page.locator(selector)
    element.wait_for()
    if not page.evaluate("() => Boolean(window.axe)"):
        script = resources.files("axe_playwright_python") / "axe.min.js"
        page.evaluate(f"() => {{ {script.read_text(encoding='utf-8')} }}")
    violations = element.evaluate(
        """async (element) => (await axe.run(element, { resultTypes: ["violations"] })).violations"""
    )
    return [_line(violation) for violation in violations if violation["impact"] in REPORTED]


def _line(violation: dict) -> str:
    places = "; ".join(node["html"] for node in violation["nodes"][:3])
    more = f"; and {len(violation['nodes']) - 3} more" if len(violation["nodes"]) > 3 else ""
    return f"{violation['impact']}: {violation['id']}: {violation['help']}: {places}{more}"
