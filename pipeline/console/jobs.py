"""The pages of jobs."""

from fastapi import APIRouter

from pipeline.console.page import Page

router = APIRouter(route_class=Page)
