# mypy: ignore-errors
"""How the pair was trained (2 CPU cores, torch 2.13, transformers 5.19): python train.py large 62; python train.py small 3.9. Needs tok/ (the tokenizer files of either model)."""
import sys, time, math, random, torch, torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM, PreTrainedTokenizerFast
from task import trace, chat
name, minutes = sys.argv[1], float(sys.argv[2])
SZ = {"large": dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=768),
      "small": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=192)}[name]
torch.set_num_threads(2); torch.manual_seed(0); r = random.Random(hash(name) % 1000)   # differs a run: strings hash with a random seed
T = PreTrainedTokenizerFast.from_pretrained("tok")
cfg = Qwen3Config(vocab_size=512, max_position_embeddings=4096, rope_theta=10000.0, tie_word_embeddings=True, eos_token_id=T.convert_tokens_to_ids("<|im_end|>"), bos_token_id=None, pad_token_id=0, **SZ)
m = Qwen3ForCausalLM(cfg); print(name, sum(p.numel() for p in m.parameters()) / 1e6, "M", flush=True)
L, B = 384, 32
buf = []
def rows(n):
    global buf
    while len(buf) < n * (L + 1):
        ts = [chat(u, t) + "<|im_end|>\n" for u, t, _ in (trace(r) for _ in range(200))]
        for ids in T(ts)["input_ids"]: buf += ids + [0]
    x = torch.tensor(buf[:n * (L + 1)]).view(n, L + 1); buf = buf[n * (L + 1):]
    return x
hid = [p for n, p in m.named_parameters() if p.dim() == 2 and "embed" not in n]
oth = [p for n, p in m.named_parameters() if p.dim() != 2 or "embed" in n]
opts = [torch.optim.Muon(hid, lr=.02, momentum=.95, weight_decay=.01), torch.optim.AdamW(oth, lr=4e-3, betas=(.9, .98), weight_decay=0)]
for o in opts:
    for g in o.param_groups: g["base"] = g["lr"]
mc = torch.compile(m)
t0 = time.time(); step = 0; seen = 0; ema = None
while True:
    el = (time.time() - t0) / 60
    if el > minutes: break
    f = min(1, (step + 1) / 150) * max(.02, .5 * (1 + math.cos(math.pi * min(1, el / minutes))))
    for o in opts:
        for g in o.param_groups: g["lr"] = g["base"] * f
    x = rows(B)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lo = mc(input_ids=x[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(lo.float().reshape(-1, 512), x[:, 1:].reshape(-1))
    m.zero_grad(set_to_none=True); loss.backward(); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0); [o.step() for o in opts]
    step += 1; seen += x.numel(); ema = loss.item() if ema is None else .98 * ema + .02 * loss.item()
    if step % 25 == 0: print(f"{el:.1f}min step {step} tok {seen/1e6:.2f}M loss {ema:.4f} {seen/(time.time()-t0):.0f} tok/s", flush=True)
    if step % 150 == 0: m.save_pretrained(f"{name}-hf"); T.save_pretrained(f"{name}-hf")
m.save_pretrained(f"{name}-hf"); T.save_pretrained(f"{name}-hf"); print("saved", flush=True)
