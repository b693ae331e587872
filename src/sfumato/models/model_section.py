"""Section ``model`` of a recipe: the encoders by way of their registry, and the Gaussian heads."""

from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, SerializeAsAny

from sfumato.encoders.encoder_protocol import ImageEncoderConfig, TextEncoderConfig
from sfumato.encoders.encoder_registry import encoder_section
from sfumato.encoders.small import SmallImageConfig, SmallTextConfig

_ImageSection = Annotated[SerializeAsAny[ImageEncoderConfig], BeforeValidator(partial(encoder_section, "image"))]
_TextSection = Annotated[SerializeAsAny[TextEncoderConfig], BeforeValidator(partial(encoder_section, "text"))]


class ModelConfig(BaseModel):
    """Encoders and Gaussian heads."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dim: PositiveInt = Field(256, description="number of dimensions of the embeddings")
    image: _ImageSection = Field(SmallImageConfig(), description="image encoder; kind decides which keys it has")
    text: _TextSection = Field(SmallTextConfig(), description="text encoder; kind decides which keys it has")
    pooling: Literal["gpo", "average", "max", "first", "last", "token"] = Field(
        "gpo",
        description="how token features become one vector; token: the class token of images, the last token of texts",
    )
    mlp: bool = Field(False, description="add a two-layer network to the linear map of the mean")
    normalize: bool = Field(True, description="scale means to unit length")
    variance: bool = Field(True, description="embeddings have variances; false: points, the deterministic baselines")
    variance_norm: bool = Field(False, description="a layer norm on the log variance")
    variance_mlp: bool = Field(False, description="add a two-layer network to the linear map of the log variance")
    init_total_variance: PositiveFloat = Field(0.1, description="sum of an embedding's variances at the start")
    covariance: Literal["ellipsoidal", "spherical-average", "spherical-one"] = Field(
        "ellipsoidal",
        description="ellipsoidal: a variance for each dimension; spherical-average: their average for all dimensions;"
        " spherical-one: a single output for all dimensions",
    )
    variance_bounds: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="lowest and highest variance of a dimension; no bounds if left out"
    )
    embeddings: PositiveInt = Field(
        1, description="number of embeddings of an item, each with dim dimensions, by local attention; only for points"
    )
    local_attention: bool = Field(
        False,
        description="PCME's heads: attended tokens (of a gru: words) are added to the pooled mean and log variance",
    )
    feature_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of the features dropped while training, of frozen backbones and of regions; 0 for none",
    )

    def check_variances(self) -> None:
        """Refuse settings of the variances that contradict each other.

        Raises:
            ValueError: there are some; the message names them.
        """
        if self.embeddings > 1 and self.variance:
            raise ValueError("model.embeddings above 1 is for points; set model.variance=false")
        if self.embeddings > 1 and self.local_attention:
            raise ValueError("model.embeddings above 1 come from local attention; leave out model.local_attention")
        if not self.variance and (self.variance_bounds or self.covariance != "ellipsoidal"):
            raise ValueError("model.covariance and model.variance_bounds are for variances, but model.variance=false")
        if self.covariance == "spherical-one" and self.variance_norm:
            raise ValueError("model.variance_norm of a single output is constant; leave it out with spherical-one")
        if self.variance_bounds:
            lowest, highest = self.variance_bounds
            if not lowest < self.init_total_variance / self.dim < highest:
                raise ValueError(
                    f"model.init_total_variance={self.init_total_variance:g} over model.dim={self.dim} dimensions"
                    f" must lie between model.variance_bounds, {lowest:g} and {highest:g} each; e.g."
                    f" {self.dim * (lowest * highest) ** 0.5:g}"
                )
