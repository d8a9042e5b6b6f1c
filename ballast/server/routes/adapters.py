"""Add vLLM's routes by which adapters are loaded and unloaded while the server runs.

They are an operator's, as `POST /admin/models` and `DELETE /admin/models/NAME`, which do the same.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import PlainTextResponse, Response

from ballast.core.errors import UnknownModel
from ballast.fleet.schema import NamedModelKeys
from ballast.fleet.twins import is_twin, twin_of
from ballast.server.admin.admin_service import PATIENCE, AdminService
from ballast.server.http.faults import Fault
from ballast.server.http.fields import Text
from ballast.server.service import Service

_Word = Annotated[Text, Field(min_length=1, max_length=4096)]


class LoadKeys(BaseModel):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: _Word
    lora_path: _Word
    base_model_name: _Word | None = None
    """None: the fleet's only model."""


class UnloadKeys(BaseModel):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: _Word


def add_adapter_routes(app: FastAPI, service: Service, admin: AdminService) -> None:
    """Add `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""
    devices = service.controller.devices

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(wanted: LoadKeys) -> Response:
        base = wanted.base_model_name
        if base is None:
            models = [m.name for m in devices.fleet.models if not is_twin(m.name)]
            if len(models) != 1:
                why = f"base_model_name: there are {len(models)} models: name one"
                raise Fault(400, why, "invalid_request", "base_model_name")
            base = models[0]
        try:
            entry = NamedModelKeys(
                name=wanted.lora_name, adapter=wanted.lora_path, base=service.models.own_name(base)
            )
        except ValidationError as error:
            raise Fault.of_validation(error.errors(), NamedModelKeys) from error
        name = await admin.add(entry)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(wanted: UnloadKeys) -> Response:
        name = service.models.own_name(wanted.lora_name)
        if all(name != a.name for model in devices.fleet.models for a in model.adapters):
            raise UnknownModel(f"there is no adapter {wanted.lora_name!r}")
        if twin_of(devices.fleet, name) is None:
            raise Fault(409, f"{name} is the fleet file's: it goes with its base", "refused")
        await admin.remove(name, PATIENCE)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
