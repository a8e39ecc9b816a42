# SPDX-License-Identifier: Apache-2.0
"""KerasHub's encoders, encoder-decoders and models of images, tiny and random.

They need the extra `keras_hub`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import keras_hub
import numpy as np
from keras_hub.src.models.stable_diffusion_3 import mmdit
from keras_hub.src.models.vae import vae_backbone

from lingvo_gpipe import PipelinedModel
from tools.keras_zoo.case import Case
from tools.keras_zoo.hub import Backbone, Task

_BERT = {
  'vocabulary_size': 20,
  'num_layers': 3,
  'num_heads': 2,
  'hidden_dim': 16,
  'intermediate_dim': 32,
  'max_sequence_length': 10,
}
_FNET = {k: v for k, v in _BERT.items() if k != 'num_heads'}
_ELECTRA = {k: v for k, v in _BERT.items() if k != 'vocabulary_size'}
_T5 = {k: v for k, v in _BERT.items() if k != 'max_sequence_length'}
_WHISPER = {
  **_T5,
  'num_mels': 4,
  'max_encoder_sequence_length': 8,
  'max_decoder_sequence_length': 8,
}
_MOONSHINE = {
  'vocabulary_size': 20,
  'filter_dim': 16,
  'encoder_num_layers': 2,
  'decoder_num_layers': 2,
  'hidden_dim': 16,
  'intermediate_dim': 16,
  'encoder_num_heads': 2,
  'decoder_num_heads': 2,
}


def _Ids(limit: int) -> Any:
  """Returns a function that makes ids below a limit."""
  return lambda random, shape: random.randint(0, limit, shape).astype('int32')


def _Positions(random: Any, shape: Any) -> Any:
  """Returns the positions to predict, ascending."""
  return np.sort(random.randint(0, shape[1], shape), axis=1).astype('int32')


def _Few(limit: int) -> Any:
  """Returns a function that makes 8 ids below a limit for each example."""
  return lambda random, shape: random.randint(0, limit, (shape[0], 8)).astype('int32')


_INPUTS = {'segment_ids': _Ids(2), 'mask_positions': _Positions}

_AUDIO: dict[str, Any] = {
  'length': 3000,
  'inputs': {
    'decoder_token_ids': _Few(20),
    'decoder_padding_mask': lambda _, shape: np.arange(8) < np.arange(3, 3 + shape[0])[:, None],
  },
}


def _Points(random: Any, shape: Any) -> Any:
  """Returns coordinates in the image."""
  return random.uniform(0, 64, (shape[0], 2, *shape[2:])).astype('float32')


_PROMPTS: dict[str, Any] = {
  'points': _Points,
  'boxes': _Points,
  'labels': lambda random, shape: random.randint(-1, 2, (shape[0], 2)).astype('float32'),
  'masks': lambda random, shape: random.rand(shape[0], 1, 16, 16, 1).astype('float32'),
}
_WITHOUT_MASKS = {
  **_PROMPTS,
  'masks': lambda _, shape: np.zeros((shape[0], 0, 16, 16, 1), 'float32'),
}


def _Case(row: str, name: str, config: Mapping[str, Any], **fields: Any) -> Case:
  """Returns the row of a backbone."""
  make = functools.partial(Backbone, name, config)
  return Case(row, make, **{'inputs': _INPUTS, **fields})


def _Texts(row: str, name: str, config: Mapping[str, Any], **fields: Any) -> list[Case]:
  """Returns the rows of an encoder of texts: backbone, classifier and masked language model."""
  fields = {'inputs': _INPUTS, **fields}
  return [
    Case(row, functools.partial(Backbone, name, config), **fields),
    Case(
      f'{row}, classifier',
      functools.partial(Task, name, 'TextClassifier', config, num_classes=3),
      **fields,
    ),
    Case(f'{row}, masked LM', functools.partial(Task, name, 'MaskedLM', config), **fields),
  ]


_TEXTS = [
  *_Texts('BERT', 'Bert', _BERT),
  *_Texts('RoBERTa', 'Roberta', _BERT),
  *_Texts('XLM-R', 'XLMRoberta', _BERT),
  *_Texts('DistilBERT', 'DistilBert', _BERT),
  *_Texts('ALBERT', 'Albert', {**_BERT, 'embedding_dim': 8, 'num_groups': 1}),
  *_Texts('DeBERTa v3', 'DebertaV3', {**_BERT, 'bucket_size': 4}),
  _Case('ELECTRA', 'Electra', {**_ELECTRA, 'vocab_size': 20, 'embedding_dim': 8}),
  *_Texts('FNet', 'FNet', _FNET),
]

_SEQUENCES = [
  _Case('T5', 'T5', _T5),
  _Case('T5, untied', 'T5', {**_T5, 'tie_embedding_weights': False}),
  Case('T5, LM', functools.partial(Task, 'T5', 'Seq2SeqLM', _T5)),
  _Case('BART', 'Bart', _BERT),
  Case('BART, LM', functools.partial(Task, 'Bart', 'Seq2SeqLM', _BERT)),
  _Case('Whisper', 'Whisper', _WHISPER),
  Case('Moonshine', functools.partial(Task, 'Moonshine', 'AudioToText', _MOONSHINE), **_AUDIO),
]

_CLIP_VISION = {
  'patch_size': 4,
  'hidden_dim': 16,
  'num_layers': 3,
  'num_heads': 2,
  'intermediate_dim': 32,
  'image_shape': (16, 16, 3),
}
_CLIP_TEXT = {
  'vocabulary_size': 20,
  'embedding_dim': 16,
  'hidden_dim': 16,
  'num_layers': 3,
  'num_heads': 2,
  'intermediate_dim': 32,
  'max_sequence_length': 8,
}
_VIT = {
  'image_shape': (16, 16, 3),
  'patch_size': 4,
  'num_layers': 3,
  'num_heads': 2,
  'hidden_dim': 16,
  'mlp_dim': 32,
}
_VIT_DET = {
  'hidden_size': 16,
  'num_layers': 3,
  'intermediate_dim': 32,
  'num_heads': 2,
  'global_attention_layer_indices': [1],
  'image_shape': (64, 64, 3),
  'num_output_channels': 8,
  'window_size': 2,
}
_PALI_GEMMA = {
  'vocabulary_size': 20,
  'image_size': 16,
  'num_layers': 2,
  'num_query_heads': 2,
  'num_key_value_heads': 1,
  'hidden_dim': 16,
  'intermediate_dim': 32,
  'head_dim': 8,
  'vit_patch_size': 4,
  'vit_num_heads': 2,
  'vit_hidden_dim': 16,
  'vit_num_layers': 2,
}
_DINO_V2 = {
  'patch_size': 4,
  'num_layers': 3,
  'hidden_dim': 16,
  'num_heads': 2,
  'intermediate_dim': 32,
  'num_register_tokens': 2,
  'image_shape': (16, 16, 3),
  'position_embedding_shape': (16, 16),
}
_SWIN = {
  'image_shape': (32, 32, 3),
  'embed_dim': 8,
  'depths': [2, 2],
  'num_heads': [1, 2],
  'window_size': 4,
  'drop_path': 0.0,
}
_MIT = {
  'image_shape': (64, 64, 3),
  'num_layers': 4,
  'hidden_dims': [4, 8, 12, 16],
  'layerwise_depths': [1, 1, 1, 1],
  'layerwise_num_heads': [1, 1, 2, 2],
  'layerwise_sr_ratios': [8, 4, 2, 1],
  'layerwise_patch_sizes': [7, 3, 3, 3],
  'layerwise_strides': [4, 2, 2, 2],
  'max_drop_path_rate': 0.0,
}
_RESNET = {
  'input_conv_filters': [64],
  'input_conv_kernel_sizes': [7],
  'stackwise_num_filters': [64, 8, 8],
  'stackwise_num_blocks': [2, 2, 2],
  'stackwise_num_strides': [1, 2, 2],
  'block_type': 'basic_block',
  'use_pre_activation': True,
  'image_shape': (32, 32, 3),
}
# Stages of four levels, as the models on top of a ResNet want them.
_PYRAMID = {
  **_RESNET,
  'stackwise_num_filters': [64, 8, 8, 8],
  'stackwise_num_blocks': [1, 1, 1, 1],
  'stackwise_num_strides': [1, 2, 2, 2],
  'image_shape': (64, 64, 3),
}
_MOBILENET = {
  'stackwise_expansion': [[16, 24], [24]],
  'stackwise_num_blocks': [2, 1],
  'stackwise_num_filters': [[8, 8], [16]],
  'stackwise_kernel_size': [[3, 3], [5]],
  'stackwise_num_strides': [[2, 1], [2]],
  'stackwise_se_ratio': [[None, None], [0.25]],
  'stackwise_activation': [['relu', 'relu'], ['hard_swish']],
  'stackwise_padding': [[1, 1], [2]],
  'output_num_filters': 32,
  'depthwise_filters': 16,
  'depthwise_stride': 1,
  'depthwise_residual': True,
  'last_layer_filter': 32,
  'squeeze_and_excite': 0.5,
  'image_shape': (32, 32, 3),
}
_EFFICIENTNET = {
  'stackwise_kernel_sizes': [3, 3, 5],
  'stackwise_num_repeats': [1, 2, 2],
  'stackwise_input_filters': [8, 8, 16],
  'stackwise_output_filters': [8, 16, 16],
  'stackwise_expansion_ratios': [1, 4, 4],
  'stackwise_squeeze_and_excite_ratios': [0.0, 0.0, 0.25],
  'stackwise_strides': [1, 2, 2],
  'stackwise_block_types': ['fused', 'fused', 'unfused'],
  'width_coefficient': 1.0,
  'depth_coefficient': 1.0,
  'dropout': 0.0,
  'num_features': 32,
  'input_shape': (32, 32, 3),
}
_DENSENET = {
  'stackwise_num_repeats': [2, 2],
  'growth_rate': 8,
  'image_shape': (32, 32, 3),
}
_CSPNET = {
  'stem_filters': 8,
  'stem_kernel_size': 3,
  'stem_strides': 1,
  'stackwise_depth': [1, 2, 2],
  'stackwise_strides': [1, 2, 2],
  'stackwise_num_filters': [8, 16, 16],
  'block_type': 'dark_block',
  'stage_type': 'csp',
  'bottle_ratio': [0.5],
  'expand_ratio': [2.0],
  'image_shape': (32, 32, 3),
}
_VGG = {
  'stackwise_num_repeats': [1, 1, 2],
  'stackwise_num_filters': [8, 8, 16],
  'image_shape': (56, 56, 3),
}
_HGNET_V2 = {
  'depths': [1, 1, 1],
  'embedding_size': 8,
  'hidden_sizes': [16, 16, 32],
  'stem_channels': [3, 8, 8],
  'hidden_act': 'relu',
  'use_learnable_affine_block': True,
  'stackwise_stage_filters': [(8, 8, 16, 1, 2, 3), (16, 8, 16, 1, 2, 3), (16, 8, 32, 1, 2, 3)],
  'apply_downsample': [False, True, True],
  'use_lightweight_conv_block': [False, False, True],
  'image_shape': (64, 64, 3),
}
_D_FINE = {
  'decoder_in_channels': [16, 16],
  'encoder_hidden_dim': 16,
  'num_labels': 4,
  'num_denoising': 0,
  'hidden_dim': 16,
  'learn_initial_query': False,
  'num_queries': 10,
  'anchor_image_size': (64, 64),
  'feat_strides': [8, 16],
  'num_feature_levels': 2,
  'encoder_in_channels': [16, 32],
  'encode_proj_layers': [1],
  'num_attention_heads': 2,
  'encoder_ffn_dim': 32,
  'num_encoder_layers': 1,
  'hidden_expansion': 0.5,
  'depth_multiplier': 0.5,
  'eval_idx': -1,
  'num_decoder_layers': 2,
  'decoder_attention_heads': 2,
  'decoder_ffn_dim': 32,
  'decoder_n_points': [2, 2],
  'lqe_hidden_dim': 8,
  'num_lqe_layers': 2,
  'out_features': ['stage2', 'stage3'],
  'image_shape': (64, 64, 3),
  'seed': 0,
}
_MMDIT = {
  'patch_size': 2,
  'hidden_dim': 16,
  'num_layers': 3,
  'num_heads': 2,
  'position_size': 8,
  'latent_shape': (8, 8, 4),
  'context_shape': (None, 12),
  'pooled_projection_shape': (10,),
  'qk_norm': 'rms_norm',
  'dual_attention_indices': (0,),
}
_VAE = {
  'encoder_num_filters': [32, 32],
  'encoder_num_blocks': [1, 1],
  'decoder_num_filters': [32, 32],
  'decoder_num_blocks': [1, 1],
  'sampler_method': 'mode',
  'sample_channels': 8,
}
_FLUX = {
  'input_channels': 8,
  'hidden_size': 16,
  'mlp_ratio': 2.0,
  'num_heads': 2,
  'depth': 2,
  'depth_single_blocks': 2,
  'axes_dim': [2, 2, 4],
  'theta': 10000,
  'use_bias': True,
  'guidance_embed': True,
  'image_shape': (6, 8),
  'text_shape': (4, 12),
  'image_ids_shape': (6, 3),
  'text_ids_shape': (4, 3),
  'y_shape': (10,),
}


def _MakePipeline(make: Callable[[], Any]) -> Any:
  """Makes a pipeline at once: plain Keras would not train these models by a squared error."""
  return PipelinedModel(make(), 1)


def _Clip() -> Any:
  backbone = keras_hub.models.CLIPBackbone(
    keras_hub.models.CLIPVisionEncoder(**_CLIP_VISION),
    keras_hub.models.CLIPTextEncoder(**_CLIP_TEXT),
    projection_dim=8,
  )
  # The outputs [batch, batch] have no targets for each example.
  outputs = {
    name: keras.ops.mean(keras.ops.tanh(t), axis=1, keepdims=True)
    for name, t in backbone.output.items()
  }
  return keras.Model(backbone.input, outputs)


def _SigLip() -> Any:
  return keras_hub.models.SigLIPBackbone(
    keras_hub.models.SigLIPVisionEncoder(**_CLIP_VISION),
    keras_hub.models.SigLIPTextEncoder(**_CLIP_TEXT),
  )


def _SegFormer() -> Any:
  return keras_hub.models.SegFormerBackbone(Backbone('MiT', _MIT), projection_filters=16)


def _SegFormerSegmenter() -> Any:
  return keras_hub.models.SegFormerImageSegmenter(_SegFormer(), num_classes=3)


def _DeepLab() -> Any:
  backbone = keras_hub.models.DeepLabV3Backbone(
    image_encoder=Backbone('ResNet', _PYRAMID),
    projection_filters=8,
    low_level_feature_key='P2',
    spatial_pyramid_pooling_key='P5',
    upsampling_size=8,
    dilation_rates=[2, 4],
    image_shape=(64, 64, 3),
  )
  return keras_hub.models.DeepLabV3ImageSegmenter(backbone, num_classes=3)


def _RetinaNet() -> Any:
  return keras_hub.models.RetinaNetBackbone(
    image_encoder=Backbone('ResNet', _PYRAMID),
    min_level=3,
    max_level=5,
    use_p5=True,
    image_shape=(64, 64, 3),
  )


def _RetinaNetDetector() -> Any:
  return keras_hub.models.RetinaNetObjectDetector(_RetinaNet(), num_classes=3)


def _DFine() -> Any:
  return keras_hub.models.DFineBackbone(
    backbone=Backbone('HGNetV2', {**_HGNET_V2, 'out_features': ['stage2', 'stage3']}), **_D_FINE
  )


def _DFineDetector() -> Any:
  return keras_hub.models.DFineObjectDetector(_DFine(), num_classes=4)


def _Sam() -> Any:
  backbone = keras_hub.models.SAMBackbone(
    image_encoder=Backbone('ViTDet', _VIT_DET),
    prompt_encoder=keras_hub.layers.SAMPromptEncoder(
      hidden_size=8, image_embedding_size=(4, 4), input_image_size=(64, 64), mask_in_channels=16
    ),
    mask_decoder=keras_hub.layers.SAMMaskDecoder(
      num_layers=2,
      hidden_size=8,
      intermediate_dim=16,
      num_heads=2,
      embedding_dim=8,
      num_multimask_outputs=3,
      iou_head_depth=3,
      iou_head_hidden_dim=8,
    ),
  )
  model = keras_hub.models.SAMImageSegmenter(backbone)
  # `train_on_batch` of a task takes no dict of targets.
  return keras.Model(model.input, model.output)


def _Vgg() -> Any:
  return Task('VGG', 'ImageClassifier', _VGG, num_classes=3, pooling_hidden_dim=16)


def _Images(row: str, name: str, config: Mapping[str, Any], **fields: Any) -> Case:
  """Returns the row of a classifier of images."""
  make = functools.partial(Task, name, 'ImageClassifier', config, num_classes=3)
  return Case(row, make, **fields)


_STATISTICS: dict[str, Any] = {'num_micro_batches': 1, 'note': 'M=1: statistics of the batch'}
_PAIRS: dict[str, Any] = {'num_micro_batches': 1, 'note': 'M=1: compares all pairs of the batch'}

_TRANSFORMERS = [
  _Case('ViT', 'ViT', _VIT),
  _Images('ViT, classifier', 'ViT', _VIT),
  Case('CLIP', _Clip, **_PAIRS),
  Case('CLIP, images', lambda: keras_hub.models.CLIPVisionEncoder(**_CLIP_VISION)),
  Case('CLIP, texts', lambda: keras_hub.models.CLIPTextEncoder(**_CLIP_TEXT)),
  Case('SigLIP', functools.partial(_MakePipeline, _SigLip), refused='overrides compute_loss'),
  Case('SigLIP, images', lambda: keras_hub.models.SigLIPVisionEncoder(**_CLIP_VISION)),
  Case('SigLIP, texts', lambda: keras_hub.models.SigLIPTextEncoder(**_CLIP_TEXT)),
  _Case('PaliGemma', 'PaliGemma', _PALI_GEMMA),
  Case('PaliGemma, LM', functools.partial(Task, 'PaliGemma', 'CausalLM', _PALI_GEMMA)),
  _Case('DINOv2', 'DINOV2', _DINO_V2),
  _Case('Swin', 'SwinTransformer', _SWIN),
  _Images('Swin, classifier', 'SwinTransformer', _SWIN),
  _Case('MiT', 'MiT', _MIT, **_STATISTICS),
  Case('SegFormer', _SegFormer, **_STATISTICS),
  Case('SegFormer, segmenter', _SegFormerSegmenter, **_STATISTICS),
  _Case('ViTDet', 'ViTDet', _VIT_DET),
  Case('SAM', _Sam, inputs=_PROMPTS),
  Case('SAM, no masks', _Sam, inputs=_WITHOUT_MASKS),
  Case('MMDiT', lambda: mmdit.MMDiT(**_MMDIT)),
  Case('VAE', lambda: vae_backbone.VAEBackbone(**_VAE)),
  _Case('Flux', 'Flux', _FLUX),
]

_CONVOLUTIONS = [
  _Images('ResNet v2 (hub)', 'ResNet', _RESNET, **_STATISTICS),
  _Images(
    'ResNet (hub)',
    'ResNet',
    {**_RESNET, 'use_pre_activation': False, 'block_type': 'bottleneck_block'},
    **_STATISTICS,
  ),
  _Images('MobileNet (hub)', 'MobileNet', _MOBILENET, **_STATISTICS),
  _Images('EfficientNet (hub)', 'EfficientNet', _EFFICIENTNET, **_STATISTICS),
  _Images('DenseNet (hub)', 'DenseNet', _DENSENET, **_STATISTICS),
  _Images('CSPNet', 'CSPNet', _CSPNET, **_STATISTICS),
  Case('VGG (hub)', _Vgg),
  _Images('HGNetV2', 'HGNetV2', _HGNET_V2, **_STATISTICS),
  Case('DeepLab v3', _DeepLab, **_STATISTICS),
  Case('RetinaNet', _RetinaNet, **_STATISTICS),
  Case(
    'RetinaNet, detector',
    functools.partial(_MakePipeline, _RetinaNetDetector),
    refused='overrides predict_step',
  ),
  Case('D-FINE', _DFine, **_STATISTICS),
  Case(
    'D-FINE, detector',
    functools.partial(_MakePipeline, _DFineDetector),
    refused='overrides predict_step',
  ),
]

CASES = [*_TEXTS, *_SEQUENCES, *_TRANSFORMERS, *_CONVOLUTIONS]
