"""Small modules of many kinds: each function returns (module, inputs) whose output is, or holds, the loss."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH, SEQ, VOCAB = 2, 32, 128


def tokens(seq=SEQ):
    return torch.arange(BATCH * seq).reshape(BATCH, seq) % VOCAB


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=64, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": tokens(), "labels": tokens()}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


def mixtral(experts="batched_mm"):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, use_cache=False, num_local_experts=4, experts_implementation=experts,
    )  # fmt: skip
    return MixtralForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


def mixtral_eager():
    return mixtral("eager")


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=VOCAB, use_cache=False, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(16)}


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=VOCAB
    )
    return BertForMaskedLM(config), {"input_ids": tokens(), "labels": tokens()}


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    images, labels = torch.zeros(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.long)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=VOCAB, num_mel_bins=16, max_source_positions=32,
        max_target_positions=32, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), {"input_features": torch.zeros(BATCH, 16, 64), "labels": tokens(16)}


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride=1):
        super().__init__()
        outside = width * 4
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        change = inside != outside or stride != 1
        down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.down = down if change else None

    def forward(self, x):
        rest = x if self.down is None else self.down(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += rest
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet-50 by its stages of 3, 4, 6 and 3 bottlenecks; 64 is the published width."""

    def __init__(self, stages=(3, 4, 6, 3), num_classes=1000, width=64):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        inside, built = width, []
        for place, count in enumerate(stages):
            blocks = []
            for i in range(count):
                blocks.append(Bottleneck(inside, width << place, 2 if i == 0 and place else 1))
                inside = (width << place) * 4
            built.append(nn.Sequential(*blocks))
        self.stages, self.fc = nn.ModuleList(built), nn.Linear(inside, num_classes)

    def forward(self, x, labels):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.fc(x.mean((2, 3))), labels)


def resnet50():
    return ResNet(width=16, num_classes=10), (torch.zeros(BATCH, 3, 64, 64), torch.zeros(BATCH, dtype=torch.long))


class UNetBlock(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
        self.time = nn.Linear(32, outside)

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training)) + self.skip(x)


class UNet(nn.Module):
    """A small diffusion UNet: down, middle with attention, up, skip connections, time embedding."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down1, self.shrink = UNetBlock(width, width), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.down2 = UNetBlock(2 * width, 2 * width)
        self.middle = nn.ModuleList(UNetBlock(2 * width, 2 * width) for _ in range(2))
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.grow, self.up = nn.ConvTranspose2d(2 * width, width, 2, 2), UNetBlock(2 * width, width)

    def forward(self, x, time):
        a = self.down1(self.first(x), time)
        h = self.down2(self.shrink(a), time)
        for block in self.middle:
            h = block(h, time)
        flat = h.flatten(2).transpose(1, 2)
        flat = flat + self.attention(flat, flat, flat, need_weights=False)[0]
        h = flat.transpose(1, 2).reshape(h.shape)
        return F.mse_loss(self.last(self.up(torch.cat([self.grow(h), a], 1), time)), x)


def unet():
    return UNet(), (torch.zeros(BATCH, 3, 16, 16), torch.zeros(BATCH, 32))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(48, VOCAB)
        self.lstm = nn.LSTM(32, 48, 2, batch_first=True, dropout=0.1)

    def forward(self, ids):
        hidden, _ = self.lstm(self.embedding(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def lstm():
    return Recurrent(), (tokens(),)


class Shared(nn.Module):
    """In-place ops on outputs and on views of them, weights shared between layers and with the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, VOCAB, bias=False)
        self.second.weight, self.head.weight = self.first.weight, self.embedding.weight

    def forward(self, ids):
        h = self.embedding(ids) * 2
        h.add_(1)
        h = self.second(self.first(h).relu_())
        h[:, ::2].mul_(0.5)
        h = h + self.first(h)
        flat = h.view(-1, 64)
        flat.tanh_()
        return F.cross_entropy(self.head(flat), ids.flatten())


def shared():
    return Shared(), (tokens(),)


class Adapted(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(F.dropout(x, 0.05, self.training))) * 2


def lora():
    module, inputs = llama()
    module.requires_grad_(False)
    for layer in module.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return module, inputs


ALL = {
    f.__name__: f for f in (gpt2, llama, mixtral, t5, bert, vit, whisper, resnet50, unet, lstm, shared, lora)
}  # fmt: skip
BLOCKLESS = ("lstm", "shared")  # nothing repeated to checkpoint
