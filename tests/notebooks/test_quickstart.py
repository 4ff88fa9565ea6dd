import pathlib

import nbclient
import nbformat
import pytest

from kvjax.registry import model_path

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # of the notebook machinery; cells run in another process
def test_every_cell_runs(path):
    model = model_path("smollm2-135m")
    if not model.exists():
        pytest.skip(f"no {model}: `kvjax pull smollm2-135m` fetches it")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(
        cwd=str(NOTEBOOKS)
    )
    printed = [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream" and output["name"] == "stdout"
    ]
    assert any("Paris" in text for text in printed)
    assert any("128.0 KiB a token, 1.0 GiB at 8K" in text for text in printed)
