"""Device meshes in a real JupyterLab: a picture that waits turns into the mesh by itself; large plans are walked."""

from __future__ import annotations

from browser.axe import serious

GROUP = """import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))"""
THEMES = ("Light", "Dark")
WIDTHS = (800, 1600)


class MeshInLab:
    """One mesh widget of a notebook."""

    def __init__(self, notebook, number: int = 0) -> None:
        self.page = notebook.page
        self.root = notebook.page.locator(".mv-mesh-widget").nth(number)
        self.root.wait_for()
        self.stage = self.root.get_by_role("application")

    def shows(self, title: str) -> None:
        """Wait until the title says this."""
        self.root.locator(".mv-title").get_by_text(title, exact=True).wait_for(timeout=20_000)

    def picked(self, rank: int) -> None:
        """Wait until the kernel has drawn the groups of a rank."""
        box = self.stage.locator(".mv-b.mv-me").get_by_text(str(rank), exact=True)
        box.wait_for(timeout=20_000)
        self.stage.locator(".mv-links").wait_for(timeout=20_000)

    def fact(self, head: str) -> str:
        """What is said below the drawing."""
        return (
            self.root.locator("dt").get_by_text(head).locator("xpath=following-sibling::dd[1]").inner_text()
        )

    def look(self, notebook, shots, name: str) -> None:
        """Take pictures in both themes and widths, and let axe look at each theme."""
        for theme in THEMES:
            notebook.theme(f"JupyterLab {theme}")
            for width in WIDTHS:
                notebook.resize(width, 1100)
                self.root.scroll_into_view_if_needed()
                self.root.screenshot(path=shots / f"{name}-{theme.lower()}-{width}.png")
            assert serious(notebook.page, ".mv-mesh-widget") == []


def test_a_picture_that_waits_turns_into_the_mesh_by_itself_and_goes_stale(lab, shots):
    notebook = lab(["%load_ext metaviz", "%meta_mesh", GROUP, "dist.destroy_process_group()", GROUP])
    notebook.run_cell(0)
    notebook.run_cell(1)
    mesh = MeshInLab(notebook)
    mesh.shows("… waiting")
    assert "this process was started alone" in mesh.fact("why")
    assert "this looks again after each cell" in mesh.fact("since")
    notebook.command("application:toggle-left-area")
    mesh.look(notebook, shots, "mesh-waiting")

    notebook.run_cell(2)
    mesh.shows("● ready dp=1 × tp=1, 1 rank, cpu")
    assert mesh.stage.locator(".mv-me .mv-n").all_text_contents() == ["0"]
    assert "it is the group of the whole job (WORLD)" in mesh.fact("dp") + mesh.fact("tp")
    mesh.look(notebook, shots, "mesh-ready")

    notebook.run_cell(3)
    mesh.shows("✗ stale dp=1 × tp=1, 1 rank, cpu")
    assert mesh.fact("why").startswith("Its process group was destroyed")
    mesh.look(notebook, shots, "mesh-stale")

    notebook.run_cell(4)
    mesh.shows("● ready dp=1 × tp=1, 1 rank, cpu")
    assert notebook.page.locator(".mv-mesh-widget").count() == 1
    assert notebook.widget_errors == notebook.outside_requests == []


def test_a_plan_of_three_axes_is_clicked_and_walked_and_the_notebook_takes_no_key(lab, shots):
    notebook = lab(
        [
            "%load_ext metaviz\nimport metaviz",
            'w = metaviz.show(metaviz.mesh("pp=4,dp=4,tp=8", ranks_per_host=8))\nw',
            "print(w.rank, w.mesh.coordinate_of(w.rank), w.colour)",
            "w.rank, w.colour = 100, 'dp'",
        ]
    )
    notebook.run_cell(0)
    notebook.run_cell(1)
    notebook.command("application:toggle-left-area")
    mesh = MeshInLab(notebook)
    cells = [cell["source"] for cell in notebook.save()["cells"]]
    mesh.stage.locator(".mv-n").get_by_text("45", exact=True).click()
    mesh.picked(45)
    for key in ("ArrowRight", "ArrowDown", "PageDown", "d", "d", "a", "b", "x"):
        mesh.page.keyboard.press(key)
    mesh.picked(86)
    assert mesh.root.locator(".mv-told").inner_text() == "rank 86: pp=2, dp=2, tp=6, host 10 (local rank 6)"
    assert mesh.fact("pp") == "32 groups of 4; that of rank 86: 22, 54, 86, 118; all of them cross hosts"
    assert mesh.fact("tp") == "16 groups of 8; that of rank 86: 80, 81, 82, 83, 84, 85, 86, 87; within hosts"
    assert [cell["source"] for cell in notebook.save()["cells"]] == cells
    mesh.look(notebook, shots, "mesh-3d")
    mesh.root.get_by_label("Colour by", exact=True).select_option(label="tp")
    notebook.eventually(2, "86 (2, 2, 6) tp\n")
    notebook.run_cell(3)
    mesh.picked(100)
    assert mesh.root.get_by_label("Colour by", exact=True).input_value() == "dp"
    mesh.root.screenshot(path=shots / "mesh-3d-colour.png")
    with notebook.page.expect_download() as download:
        mesh.root.get_by_role("button", name="Save as SVG").click()
    saved = download.value.path().read_text(encoding="utf-8")
    assert "□ rank 100: pp=3, dp=0, tp=4, host 12 (local rank 4)" in saved
    assert notebook.widget_errors == notebook.outside_requests == []


def test_16384_ranks_are_walked_to_places_that_are_folded_away(lab, shots):
    plan = 'w = metaviz.show(metaviz.mesh("pp=8,dp=32,cp=8,tp=8", ranks_per_host=8))\nw'
    notebook = lab(["%load_ext metaviz\nimport metaviz", plan, "print(w.rank)"])
    notebook.run_all()
    notebook.command("application:toggle-left-area")
    mesh = MeshInLab(notebook)
    mesh.stage.locator(".mv-n").get_by_text("129", exact=True).click()
    mesh.picked(129)
    mesh.page.keyboard.press("PageDown")
    mesh.picked(193)
    assert (
        mesh.root.locator(".mv-told").inner_text()
        == "rank 193: pp=0, dp=3, cp=0, tp=1, host 24 (local rank 1)"
    )
    mesh.page.keyboard.press("+")
    mesh.page.keyboard.press("+")
    mesh.picked(4289)
    notebook.eventually(2, "4289\n")
    assert mesh.stage.locator(".mv-b").count() == 3 * 4 * 8 * 8
    assert "… 15,616 of 16,384 ranks are folded away along pp, dp" in mesh.stage.inner_text()
    mesh.look(notebook, shots, "mesh-16384")
    assert notebook.widget_errors == notebook.outside_requests == []
