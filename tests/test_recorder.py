"""What each sort of op becomes on the tape: all of them equal what an ordinary build computes."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn
from torch.nn import functional as F
from zoo import holding

import metaviz
from metaviz.errors import StalePlan, ValueRead

REAL = torch.arange(12.0).reshape(3, 4)


def slices():
    weight = torch.zeros(5, 5)
    weight[1:3] = 1
    weight[:, 0] += 2.5
    weight[0, 0], weight[4, 4] = 7, torch.rand(())
    weight[..., -1] = torch.rand(5)
    weight[2] *= torch.rand(5)
    return holding(weight=weight)


def masks():
    weight = torch.randn(6, 4)
    weight[weight > 1] = 0
    weight[weight < -1] += torch.rand(int((weight < -1).sum()))
    return holding(
        weight=weight, kept=weight[weight > 0], some=weight[weight[:, 0] > 0], one=weight.nonzero()
    )


def indices():
    weight, diagonal = torch.rand(5, 5), torch.arange(5)
    weight[diagonal, diagonal] = 1
    weight[diagonal[:4], diagonal[1:]] = torch.rand(4)
    weight.index_put_((diagonal[:2], diagonal[2:4]), torch.rand(2), accumulate=True)
    weight.scatter_(0, torch.randperm(5)[None], 9.0).index_add_(0, diagonal[:1], torch.ones(1, 5))
    return holding(weight=weight.masked_fill_(weight == 1, -1).fill_diagonal_(0.5))


def chains():
    weight = torch.empty(4, 4).normal_().mul_(2).add_(1).clamp_(-1, 1).unsqueeze_(0).squeeze_(0)
    flat = weight.view(-1)
    flat[::5].fill_(1)
    return holding(weight=weight, turned=weight.t_(), part=flat[3:7], integers=flat.view(torch.int32))


def outputs():
    added, drawn, grown = torch.empty(3), torch.empty(4), torch.empty(0)
    torch.add(torch.ones(3), torch.rand(3), out=added)
    torch.rand(4, out=drawn)
    torch.cat([added, drawn], out=grown)
    return holding(added=added, drawn=drawn, grown=grown, order=torch.randperm(4, out=torch.empty(4).long()))


def sizes():
    weight, grown = torch.rand(4), torch.ones(2)
    weight.resize_(2, 2)
    grown.resize_(4)[2:] = 3
    emptied = torch.rand(3).set_()
    moved = torch.zeros(4).set_(torch.rand(6))
    on_storage = torch.empty(0).set_(torch.rand(6).untyped_storage(), 1, (2, 2))
    return holding(weight=weight, grown=grown, emptied=emptied, moved=moved, on_storage=on_storage)


def algebra():
    a = torch.randn(4, 4)
    u, s, v = torch.linalg.svd(a)
    values, vectors = torch.linalg.eig(a)
    held = holding(u=u, s=s, v=v, values=values, vectors=vectors, q=torch.linalg.qr(a)[0])
    held.register_buffer("inverse", torch.linalg.inv(a))
    held.register_buffer("singular", torch.linalg.svdvals(a))
    held.register_buffer("symmetric", torch.linalg.eigvalsh(a @ a.T))
    held.register_buffer("spectral", a / torch.linalg.matrix_norm(a, 2))
    return held


def signals():
    x = torch.randn(8)
    image = F.interpolate(torch.rand(1, 1, 4, 4), size=(6, 6), mode="bicubic", antialias=True)
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"))
    return holding(
        fft=torch.fft.rfft(x * torch.hann_window(8)),
        sums=x.cumsum(0),
        where=torch.where(x > 0, x, torch.zeros(())),
        einsum=torch.einsum("i,j->ij", x, x),
        image=image,
        grid=grid.flatten(1).T,
        hot=F.one_hot(torch.tensor([0, 2])),
        order=x.argsort(),
        best=x.topk(3).values,
        unique=torch.tensor([3, 1, 3]).unique(),
    )


def draws():
    p = torch.rand(6)
    return holding(
        order=torch.randperm(9),
        chosen=torch.multinomial(p, 3),
        coins=torch.bernoulli(p),
        dropped=F.dropout(p),
        counts=torch.poisson(5 * p),
        gamma=torch.distributions.Gamma(p + 1, p + 1).sample(),
        scaled=torch.normal(p, p),
        whole=torch.randint(3, 9, (5,)),
        like=torch.rand_like(p),
        steep=torch.empty(5).exponential_(),
        last=torch.rand(3),
    )


def quantized():
    x = torch.randn(4, 4)
    back = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
    return holding(back=back, layer=torch.ao.nn.quantized.Linear(4, 4), other=nn.Linear(2, 2))


def sparse():
    matrix = torch.sparse_coo_tensor([[0, 1], [1, 0]], torch.rand(2), (2, 2))
    return holding(
        dense=matrix.to_dense(), product=matrix @ torch.rand(2, 3), eye=torch.eye(2).to_sparse() @ REAL[:2]
    )


def norms():
    training, evaluating = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    training(torch.randn(8, 3))
    with torch.no_grad():
        return holding(training=training, evaluating=evaluating, seen=evaluating(torch.rand(4, 3)))


def gradients():
    layer = nn.Linear(3, 3)
    (gradient,) = torch.autograd.grad(layer(torch.randn(2, 3)).pow(2).sum(), layer.weight)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    mapped = torch.vmap(torch.func.grad(lambda x: (x**2).sum()))(torch.rand(3, 2))
    return holding(layer=layer, gradient=gradient, mapped=mapped)


def scripted():
    @torch.jit.script
    def double(x):
        return x * 2 + torch.ones(3)

    return holding(value=double(torch.rand(3)))


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3


def own_function():
    return holding(value=Triple.apply(torch.rand(3)))


def real_tensors():
    layer = nn.Linear(4, 3)
    layer.weight.data.add_(REAL)
    return holding(
        layer=layer, cat=torch.cat([REAL, torch.ones(1, 4)]), like=torch.rand_like(REAL), new=REAL.new_ones(2)
    )


def probed():
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(2))
    layers(torch.zeros(1, 3, 8, 8))
    return layers


def clusters():
    points = torch.randn(20, 3)
    centres = points[torch.randperm(20)[:4]]
    for _ in range(3):
        nearest = torch.cdist(points, centres).argmin(1)
        centres = torch.stack(
            [points[nearest == i].mean(0) if (nearest == i).any() else centres[i] for i in range(4)]
        )
    return holding(centres=centres)


def tries():
    attempts = 0
    while torch.det(weight := torch.randn(3, 3)) < 1:
        attempts += 1
    return holding(weight=weight, attempts=attempts, after=nn.Linear(2, 2))


KINDS = [
    slices,
    masks,
    indices,
    chains,
    outputs,
    sizes,
    algebra,
    signals,
    draws,
    quantized,
    sparse,
    norms,
    gradients,
]
KINDS += [scripted, own_function, real_tensors, probed, clusters, tries]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:.*quantize", "ignore:Sparse")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_ops_give_what_they_give_in_an_ordinary_build(kind):
    assert zoo.faults(kind) == []


def test_values_that_the_constructor_has_seen_stay_the_same_with_other_draws():
    model = metaviz.build(masks)
    metaviz.materialize(model, rng="keyed")
    assert len(model.kept) == (model.weight > 0).sum()
    assert torch.equal(model.one, model.weight.nonzero())
    model = metaviz.build(zoo.ItemFromParameter)
    metaviz.materialize(model, rng="keyed")
    assert model.cached == model.beta.item()


def test_writes_into_a_real_tensor_reach_it_with_the_values_of_an_ordinary_build():
    outside = torch.zeros(3)

    def build():
        outside.copy_(torch.rand(3)).mul_(2)
        return holding(own=torch.rand(3))

    ordinary, model = zoo.pair(build)
    ours = outside.clone()
    torch.manual_seed(11)
    build()
    assert torch.equal(ours, outside) and outside.ne(0).all()
    metaviz.materialize(model)
    assert zoo.differences(ordinary, model) == []


def test_a_real_tensor_drawn_into_takes_its_place_in_the_stream():
    outside = torch.empty(5)

    def build():
        first = torch.rand(3)
        outside.normal_()
        return holding(first=first, drawn=outside.clone(), last=torch.rand(3))

    assert zoo.faults(build) == []


def test_real_tensors_that_a_module_holds_are_kept_as_they_are():
    model = metaviz.build(lambda: holding(real=REAL, part=REAL[1]))
    assert model.real is REAL
    assert metaviz.materialize(model).kept == ("real", "part")


def test_a_real_tensor_changed_after_the_build_does_not_change_what_was_recorded():
    real = torch.ones(3)
    model = metaviz.build(lambda: holding(sum=torch.zeros(3) + real))
    real.fill_(5)
    metaviz.materialize(model)
    assert torch.equal(model.sum, torch.ones(3))


def test_a_big_real_tensor_changed_after_the_build_is_noticed(monkeypatch):
    monkeypatch.setattr("metaviz.core.recorder._COPY_LIMIT", 8)
    real = torch.ones(3)
    model = metaviz.build(lambda: holding(sum=torch.zeros(3) + real))
    metaviz.materialize(model)
    assert torch.equal(model.sum, torch.ones(3))
    metaviz.unload(model)
    real.fill_(5)
    with pytest.raises(StalePlan, match=r"has been changed since the build.*metaviz\.build"):
        metaviz.materialize(model)
    assert model.sum.is_meta


def by_hand():
    layer = nn.Linear(3, 3, device="meta")
    with torch.device("meta"):
        inner = nn.LSTM(3, 3)
    moved = nn.Linear(3, 3).to("meta")
    layer.weight.data[1:] = 0
    inner.weight_ih_l0.data.copy_(torch.ones(12, 3))
    return holding(layer=layer, inner=inner, moved=moved, drawn=nn.Linear(3, 3))


def test_what_a_constructor_puts_on_meta_itself_stays_there_and_draws_nothing():
    ordinary, model = zoo.pair(by_hand)
    blocked = metaviz.plan(model, source="replay").blocked
    assert set(blocked) == {name for name, parameter in ordinary.named_parameters() if parameter.is_meta}
    metaviz.materialize(model, source="replay", blocked="skip")
    assert zoo.differences(ordinary, model) == []


def test_meta_layers_made_real_in_the_constructor_are_built_like_others():
    def build():
        with torch.device("meta"):
            layer = nn.Linear(3, 3)
        layer.to_empty(device="cpu").reset_parameters()
        assigned = nn.Linear(3, 3, device="meta")
        assigned.load_state_dict({"weight": torch.randn(3, 3), "bias": torch.ones(3)}, assign=True)
        return holding(layer=layer, assigned=assigned)

    assert zoo.faults(build) == []


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.weight.data.tolist()])
def test_values_of_a_meta_tensor_cannot_be_had_as_in_an_ordinary_build(move):
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        metaviz.build(lambda: move(nn.Linear(2, 2, device="meta")))


def test_what_no_op_writes_is_blocked_and_the_rest_is_not():
    def build():
        half = torch.empty(4, 4)
        half[:2] = 1
        return holding(never=torch.empty(3), partly=half, whole=torch.empty(2).zero_())

    model = metaviz.build(build)
    blocked = metaviz.plan(model).blocked
    assert set(blocked) == {"never", "partly"}
    assert all("ninitialized even in an ordinary build" in reason for reason in blocked.values())
    assert "32 B" in blocked["partly"]


def test_tensors_of_an_earlier_build_are_taken_over_with_their_values():
    def build(first):
        return holding(tied=first.weight, twice=nn.Parameter(first.weight * 2), own=nn.Linear(3, 3))

    torch.manual_seed(11)
    first = nn.Linear(3, 3)
    ordinary = build(first)
    torch.manual_seed(11)
    with metaviz.recording():
        other = nn.Linear(3, 3)
    torch.rand(12)
    model = metaviz.build(build, other)
    metaviz.materialize(model)
    assert zoo.differences(ordinary, model, "tied") == zoo.differences(ordinary, model, "twice") == []
    assert model.tied is other.weight and not other.weight.is_meta and other.bias.is_meta


def test_an_op_without_meta_kernel_is_run_for_real_below_the_limit_only():
    def build():
        return holding(order=torch.rand(2000).histc(10))

    assert zoo.faults(build) == []
    with pytest.raises(ValueRead), metaviz.recording(value_limit=1000):
        torch.rand(2000).nonzero()


def test_an_address_leads_to_the_values_and_stays_the_same():
    def build():
        from safetensors.torch import load, save

        first = torch.arange(4.0)
        before = first.data_ptr()
        first.add_(1)
        kept = nn.Parameter(load(save({"kept": first}))["kept"])
        assert first.data_ptr() == before != kept.data_ptr()
        assert first[1:].data_ptr() == before + 4
        return nn.ParameterList([kept])

    model = metaviz.build(build)
    metaviz.materialize(model)
    assert model[0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_write_through_an_overlapping_view_leaves_what_it_does_not_reach():
    def build():
        holder = nn.Module()
        values = torch.arange(9.0)
        values.as_strided((3, 3), (2, 2)).fill_(7)
        holder.register_buffer("values", values)
        return holder

    model = metaviz.build(build)
    metaviz.materialize(model)
    assert model.values.tolist() == [7.0, 1.0, 7.0, 3.0, 7.0, 5.0, 7.0, 7.0, 7.0]
