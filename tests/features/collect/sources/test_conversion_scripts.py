"""The scripts of docs/rollouts.md convert dumps of the frameworks' shapes, and what they write is read.

The frameworks are not installed here: their containers are stood in for by a module with the same
members, pickled as theirs would be. slime's dump is plain Python and the real thing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_helpers import read_file, rollout

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[4] / "docs" / "rollouts.md"
STAND_IN = """
class Container(dict):
    metadata = None
    def __setstate__(self, state): self.__dict__.update(state)

class Proto:
    pass
"""
DUMPS = """
import pickle, torch
from stand_in import Container, Proto

torch.save(
    {"rollout_id": 7, "samples": [
        {"group_index": 3, "index": 25, "rollout_id": None, "prompt": "p", "tokens": [11, 12, 21, 90, 22],
         "response_length": 3, "loss_mask": torch.tensor([1, 0, 1]), "rollout_log_probs": [-0.5, 0.0, -0.25],
         "weight_versions": ["8", "8"], "reward": {"acc": 1.0}, "status": "truncated", "remove_sample": False}]},
    "7.pt",
)
jagged = torch.nested.nested_tensor
torch.save(
    {"tensordict": Container(
        prompts=jagged([torch.tensor([11, 12]), torch.tensor([5])]),
        responses=jagged([torch.tensor([21, 90, 22]), torch.tensor([6])]),
        response_mask=jagged([torch.tensor([1, 0, 1]), torch.tensor([1])]),
        rollout_log_probs=jagged([torch.tensor([-0.5, 0.0, -0.25]), torch.tensor([-1.0])])),
     "tags": [{"min_global_steps": 6, "max_global_steps": 6}, {"is_padding": True}],
     "keys": ["u1_2_0", "u2_0_0"], "global_steps": 7},
    "tq_batch.pt",
)
proto = Proto()
proto.batch = Container(
    prompts=torch.tensor([[0, 11]]), responses=torch.tensor([[21, 0]]), response_mask=torch.tensor([[1, 0]]),
    attention_mask=torch.tensor([[0, 1, 1, 0]]), rollout_log_probs=torch.tensor([[-0.5, 0.0]]))
proto.non_tensor_batch = {"uid": ["u9"], "min_global_steps": [4], "max_global_steps": [4]}
with open("gen_batch.dp", "wb") as file:
    pickle.dump(proto, file)
batch = Container(
    sequences=torch.tensor([[0, 0, 11, 12, 21, 22, 2]] * 2), attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2),
    response_mask=torch.tensor([[0, 1, 1, 1]] * 2), loss_mask=torch.tensor([[0.0, 1.0, 1.0, 1.0]] * 2),
    rollout_logprobs=torch.tensor([[0.0, -0.5, -0.25, 0.0]] * 2), action_log_probs=None)
batch.metadata = {"pad_size": 1}
with open("global_step_5_training_input.pkl", "wb") as file:
    pickle.dump(batch, file)
"""

COMMANDS = (
    ("convert_slime.py", "7.pt", "7.jsonl"),
    ("convert_verl.py", "tq_batch.pt", "tq_batch.jsonl"),
    ("convert_verl.py", "gen_batch.dp", "gen_batch.jsonl", "5"),
    ("convert_skyrl.py", "global_step_5_training_input.pkl", "global_step_5_training_input.jsonl"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps, converted by the scripts as the docs print them, in one process: torch loads slowly."""
    folder = tmp_path_factory.mktemp("conversion")
    for script in re.findall(r"```python\n(# (convert_\w+\.py)\n.*?)```", DOCS.read_text(), re.DOTALL):
        (folder / script[1]).write_text(script[0])
    (folder / "stand_in.py").write_text(STAND_IN)
    steps = "\n".join(f"sys.argv = {list(command)}; runpy.run_path({command[0]!r})" for command in COMMANDS)
    (folder / "all.py").write_text(f"import runpy, sys\n{DUMPS}\n{steps}\n")
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "all.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_slime(folder: Path) -> None:
    items, _ = read_file(folder / "7.jsonl")
    item = rollout(items)
    assert (item.token_ids, item.version, item.file_step) == ((11, 12, 21, 90, 22), 7, 7)
    assert item.sampled_mask == (False, False, True, False, True)


def test_verl_transfer_queue(folder: Path) -> None:
    items, counts = read_file(folder / "tq_batch.jsonl")
    assert (rollout(items).token_ids, rollout(items).version) == ((11, 12, 21, 90, 22), 6)
    assert rollout(items).source_group == "u1"
    assert (counts.rollouts, counts.pad_rows) == (1, 1)


def test_verl_generation_batch(folder: Path) -> None:
    items, _ = read_file(folder / "gen_batch.jsonl")
    item = rollout(items)
    assert (item.token_ids, item.version, item.file_step, item.source_group) == ((11, 21), 4, 5, "u9")


def test_skyrl(folder: Path) -> None:
    items, counts = read_file(folder / "global_step_5_training_input.jsonl", assume_synchronous=True)
    item = rollout(items)
    assert (item.token_ids, item.version) == ((11, 12, 21, 22, 2), 4)
    assert item.sampled_mask == (False, False, True, True, False)
    assert (counts.rollouts, counts.pad_rows) == (1, 1)
