"""Retained graphs of captured layers on a card, with backwards in memory of their own and (planted) without."""
import sys, torch, transformers as T
sys.path.insert(0, ".")
from npu_trainer_kernels import apply_npu_kernels
from npu_trainer_kernels.capture import graph

def net():
    torch.manual_seed(0)
    return T.LlamaForCausalLM(T.LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, use_cache=False)).cuda().bfloat16().train()

def grads(model): return [p.grad.float().clone() for p in model.parameters()]

def main(apart):
    if not apart:
        before = graph.DeviceRecorder.begin
        graph.DeviceRecorder.begin = lambda self, likes=(), *, apart=False: before(self, likes)
    model = net(); handle = apply_npu_kernels(model, capture="on")
    ids = torch.randint(3, 500, (2, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(3):
        model.zero_grad(); model(input_ids=ids, labels=ids).loss.backward()
    expected = grads(model)
    torch.cuda.synchronize()
    print("reserved MiB", torch.cuda.memory_reserved() >> 20, "peak", torch.cuda.max_memory_allocated() >> 20)
    loss = model(input_ids=ids, labels=ids).loss
    model.zero_grad(); loss.backward(retain_graph=True); first = grads(model)
    model.zero_grad(); loss.backward(); second = grads(model)
    same = lambda a, b: max(float((x - y).norm() / (y.norm() + 1e-9)) for x, y in zip(a, b))
    print("apart" if apart else "one pool", "first", same(first, expected), "second", same(second, expected))
    print(str(handle.report()).split("captured layers")[1][:300])
    graph.DeviceRecorder.begin = before if not apart else graph.DeviceRecorder.begin

main(True); main(False)
