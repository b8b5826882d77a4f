"""Three steps of each of TRL's trainers, on tiny models and words that are made here. Imports TRL."""

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
TRAINERS = ("SFT", "DPO", "KTO", "GRPO", "RLOO")


def new_model(family="llama", **sizes):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **SIZES | sizes))


def _tokenizer():
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _data(name):
    generator = torch.Generator().manual_seed(1)

    def some(words):
        return " ".join(WORDS[at] for at in torch.randint(3, len(WORDS), (words,), generator=generator))

    def row(at):
        prompt = {"prompt": some(4) + " "}
        if name == "SFT":
            return prompt | {"completion": some(6)}
        if name == "DPO":
            return prompt | {"chosen": some(6), "rejected": some(5)}
        return prompt | {"completion": some(6), "label": bool(at % 2)} if name == "KTO" else prompt

    return Dataset.from_list([row(at) for at in range(12)])


def new_trainer(name, model, out, *, reference=None, peft=None, **options):
    common = {
        "output_dir": str(out), "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "seed": 0, "bf16": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    more = {"peft_config": peft} if peft is not None else {}
    if name in ("DPO", "KTO") and peft is None:
        more["ref_model"] = reference
    if name in ("GRPO", "RLOO"):
        common |= {"num_generations": 2, "max_completion_length": 6, "temperature": 0.7, "beta": 0.0}
        more["reward_funcs"] = lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions]
    else:
        common["max_length"] = 16
    config, trainer = getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")
    made = trainer(model, args=config(**common | options), train_dataset=_data(name), processing_class=_tokenizer(), **more)
    made.remove_callback(transformers.PrinterCallback)
    return made


def train(trainer):
    """Return each step's loss and norm of gradients."""
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
