# mypy: ignore-errors
"""Arithmetic word traces in a reasoning model's voice: hard segments compute, easy ones restate."""
import random
def trace(r: random.Random) -> tuple[str, str, int]:
    a, b = r.randint(11, 99), r.randint(2, 9); c, d = r.randint(11, 99), r.randint(2, 9)
    form = r.random()
    op = "+" if form < .6 or a * b < c * d else "-"
    p, q = a * b, c * d
    tot = p + q if op == "+" else p - q
    third = r.random() < .5
    expr = f"{a}*{b} {op} {c}*{d}"
    if third:
        e = r.randint(11, 99); op2 = "-" if tot > e and r.random() < .5 else "+"
        expr += f" {op2} {e}"
        fin = tot + e if op2 == "+" else tot - e
    else: fin = tot
    P = lambda *x: r.choice(x)
    s = [P(f"I need to find {expr}.", f"The task is to find {expr}.", f"We are asked for {expr}.")]
    s.append(P("First,", "Let me start:", "To begin,") + f" {a}*{b} = {p}.")
    if r.random() < .25: s.append(P("Wait,", "Hmm,") + f" let me check: {b}*{a} = {p}." + P(" Good.", " Right."))
    s.append(P("Next,", "Then", "After that,") + f" {c}*{d} = {q}.")
    if r.random() < .25: s.append(P("Wait,", "Hmm,") + f" let me check: {d}*{c} = {q}." + P(" Good.", " Right."))
    s.append(P(f"Now, the two products are {p} and {q}.", f"So, we have {a}*{b} = {p} and {c}*{d} = {q}.", f"Now, the first product is {p} and the second product is {q}."))
    word = "sum" if op == "+" else "difference"
    s.append(P("But what is", "Let me work out", "I still need") + f" {p} {op} {q}" + P("? It is", ": it is") + f" {tot}.")
    s.append(P(f"So, the {word} of the two products is {tot}.", f"Thus, the {word} is {tot}.", f"Hence, {a}*{b} {op} {c}*{d} is {tot}."))
    if third:
        s.append(P("But there is one more step:", "Finally, compute", "Also, I must do") + f" {tot} {op2} {e} = {fin}.")
        if r.random() < .2: s.append(P("Wait,", "Hmm,") + f" let me check: {fin} {'-' if op2 == '+' else '+'} {e} = {tot}." + P(" Good.", " Right."))
    s.append(P(f"Therefore, the value of {expr} is {fin}.", f"Therefore, {expr} = {fin}.", f"Thus, the final result is {fin}."))
    ans = P(f"The value of {expr} is {fin}.", f"The final answer is {fin}.", f"So {expr} = {fin}.")
    user = P(f"What is {expr}?", f"Compute {expr}.", f"Please work out {expr}.")
    sep = P(" ", " ", "\n\n")
    return user, "<think>\n" + sep.join(s) + "\n</think>\n\n" + ans, fin
def chat(user: str, reply: str = "") -> str: return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{reply}"
if __name__ == "__main__":
    r = random.Random(0)
    for _ in range(3): u, t, f = trace(r); print(chat(u, t), "\n")
