from __future__ import annotations
from typing import TYPE_CHECKING
import pytest, torch
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.worker.conftest import VOCAB_SIZE, SavedModel
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.quantized_models import CASES, save_quantized

@pytest.mark.parametrize("name", list(CASES))
def test_it(tmp_path, name):
    saved = save_quantized(CASES[name], tmp_path)
    executor = make_executor(saved.directory)
    out=[]
    for prompt in random_prompts([6]*12+[40]*3, VOCAB_SIZE):
        driver = Driver(executor)
        seen=[]
        executor.watch_logits(lambda logits: seen.append(logits.float().clone()))
        g=driver.add(prompt, SamplingParams(max_tokens=4, temperature=0.0))
        driver.run()
        executor.watch_logits(None)
        found=torch.cat(seen)
        with torch.inference_mode():
            exp=saved.model(torch.tensor([g.all_ids[:-1]])).logits[0][-4:]
        out.append(((found-exp).abs().max()/exp.std()).item())
        same = saved.generate(prompt,4)==[t.token_id for t in g.tokens]
        if not same: print("TOKENS DIFFER")
    print(name, ' '.join(f'{o:.1e}' for o in out))
