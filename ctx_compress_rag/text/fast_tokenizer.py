"""A tokenizer as this library uses transformers' own, for a process without transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer


class FastTokenizer:
    """The tokenizer of a `tokenizer.json`, with special tokens by name ("bos_token", ...) and a chat template, if any.

    The methods are those of transformers' tokenizers that this library calls, with the same results.
    """

    def __init__(self, backend: str, special: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer = Tokenizer.from_str(backend)
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self.special_tokens_map, self.chat_template = dict(special), chat_template
        self.bos_token, self.eos_token, self.unk_token, self.pad_token = (
            special.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")
        )
        self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id = (
            None if name is None else self.backend_tokenizer.token_to_id(name)
            for name in (self.bos_token, self.eos_token, self.unk_token, self.pad_token)
        )

    @classmethod
    def parts_of(cls, tokenizer: Any) -> dict[str, Any]:
        """Return the arguments, as JSON can hold them, that make a FastTokenizer of one of transformers."""
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        template = tokenizer.chat_template
        return {"backend": tokenizer.backend_tokenizer.to_str(), "special": special, "chat_template": template}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __deepcopy__(self, memo: dict[int, Any]) -> FastTokenizer:
        made = copy.copy(self)
        made.backend_tokenizer = copy.deepcopy(self.backend_tokenizer, memo)
        return made

    def __call__(self, text: str, add_special_tokens: bool = True, **unused: Any) -> dict[str, Any]:
        [encoded] = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **unused: Any) -> str:
        return str(self.backend_tokenizer.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens))

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        found: Mapping[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: id for id, token in self.added_tokens_decoder.items()}

    def add_tokens(self, tokens: Sequence[AddedToken], special_tokens: bool = False) -> None:
        self.backend_tokenizer.add_special_tokens(list(tokens))

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self.backend_tokenizer.token_to_id(token) for token in tokens]

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **unused: Any) -> str:
        return str(self._template.render(messages=messages, add_generation_prompt=True, **self.special_tokens_map))

    @cached_property
    def _template(self) -> Any:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def as_json(value: object, **options: Any) -> str:
            return json.dumps(value, **{"ensure_ascii": False, **options})

        # The environment that templates are written for (transformers' documentation, "Writing a chat template").
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = as_json
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        return environment.from_string(self.chat_template or "")
