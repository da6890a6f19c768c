"""An answer that is JSON of a given schema, whatever the model would rather say, with speculation and without.

Run it with ``pip install 'specjax[grammar]'`` and ``python examples/json_answer.py``. The schema is compiled to a table of states
once. Inside a draft every token is masked by the state that the draft tokens before it lead to, so nothing forbidden is ever
accepted, and the answer is the same as without a draft.
"""

import argparse
import json

import specjax

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "capital"],
}
PROMPT = 'Where is the Eiffel Tower? Answer like this: {"city": "Rome", "country": "Italy", "capital": true}.'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    model = specjax.load_model(parser.parse_args().model)
    allowed = specjax.AllowedTokens.from_json_schema(SCHEMA, model.tokenizer, model.stop_token_ids)
    print(f"{allowed.num_states} states for {allowed.vocab_size} tokens")

    prompt = [{"role": "user", "content": PROMPT}]
    params = specjax.SamplingParams(temperature=0, max_tokens=160)
    answers = []
    for drafter in (None, specjax.drafters.prompt_lookup(num_speculative_tokens=4)):
        (answer,) = specjax.generate(model, [prompt], params, drafter=drafter, allowed_tokens=allowed)
        print(f"{answer.text}  ({answer.finish_reason}, {answer.stats.mean_acceptance_length:.2f} tokens per round)")
        answers.append(answer.token_ids)
    print(f"The same tokens: {answers[0] == answers[1]}. As Python has it: {json.loads(answer.text)}")


if __name__ == "__main__":
    main()
