"""transformers' Trainer, for tests of what it does with a model that onepass is applied to."""

import pytest
import torch
import transformers
from integrations.huggingface.families import VOCABULARY

DEFAULTS = {
    "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "weight_decay": 0.1, "max_grad_norm": 0.0,
    "save_strategy": "no", "use_cpu": True, "learning_rate": 1e-2,
}  # fmt: skip


def trained(model, optimizer, out, *, steps=4, resume=None, callbacks=(), collate=None, **options):
    """Let Trainer train the model, with accumulation. Return its losses."""
    accelerate = pytest.importorskip("accelerate")
    tokens = torch.randint(3, VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(3))
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, logging_steps=1, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, seed=0, **DEFAULTS | options,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(model, arguments, collate, data, optimizers=(optimizer, None), callbacks=[*callbacks])
    trainer.remove_callback(transformers.PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
