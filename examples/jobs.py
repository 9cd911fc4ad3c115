"""Jobs with plain nats-py: publish three, wait for their answers. It imports nothing of Shoal.

python examples/jobs.py nats://127.0.0.1:4222 [MODEL]
"""

import asyncio
import json
import sys
import uuid

import nats
from nats.js.errors import APIError

PROMPTS = {"one": "Tell me of the sea.", "two": "And of the wind.", "three": "Good night."}
SUBJECT_TAKEN = "maximum messages per subject exceeded"


async def main(url: str, model: str) -> None:
    connection = await nats.connect(url)
    stream = connection.jetstream()
    queue = f"example-{uuid.uuid4().hex}"
    for key, prompt in PROMPTS.items():
        messages = [{"role": "user", "content": prompt}]
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        job = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body}
        try:
            await stream.publish(f"shoal.job.-.{queue}.{key}", json.dumps(job).encode())
        except APIError as error:  # after a publish of unknown fate: it is there already
            if SUBJECT_TAKEN not in str(error):
                raise
    answers = await stream.subscribe(f"shoal.ans.-.{queue}.*", stream="ANSWERS", ordered_consumer=True)
    for _ in PROMPTS:
        try:
            message = await answers.next_msg(timeout=60)
        except TimeoutError:  # the jobs are kept, and so will their answers be
            sys.exit(f"no answer for a minute: is {model} served?")
        answer = json.loads(message.data)
        if answer["error"] is not None or answer["response"]["status_code"] != 200:
            print(answer["custom_id"], "failed:", answer["error"] or answer["response"]["body"]["error"])
            continue
        print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
    await answers.unsubscribe()
    await connection.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: jobs.py URL [MODEL]; `shoal up` prints the URL of its bus")
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "fake"))
