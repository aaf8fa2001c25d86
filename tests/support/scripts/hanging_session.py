"""A session in which a worker is slow or hangs: ``python hanging_session.py HOW FLAGS``. The second worker hangs."""

import sys
import time
from typing import Any

import torch

from examples import own_loop
from rapidformer_templates import compose

HOW = sys.argv[1]


def main() -> None:
    with compose(own_loop.build_model, lr=1e-3, micro_batch_size=2, device="cpu", argv=sys.argv[2:]) as session:
        hangs = session.workers.rank == 1

        def wait(*arguments: Any) -> None:
            time.sleep(600 if hangs and HOW == "in generate" else 0.5)

        prompts = own_loop.TOKENS[:2, :4]
        session.step([own_loop.collate(torch.arange(2))])
        session.evaluate(own_loop.collate(torch.arange(2)))
        if hangs and HOW == "after evaluate":
            time.sleep(600)
        session.model.transformer.h[0].register_forward_hook(wait)
        session.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, eos_token_id=-1)
        print("done", flush=True)


if __name__ == "__main__":
    main()
