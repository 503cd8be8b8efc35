"""Plans, their layouts, estimates, idempotency keys

Revision: 0001, the first.
"""

import sqlalchemy as sa

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "plans",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("job_hash", sa.String(64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("num_gpus", sa.Integer(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("tokens_per_second_per_gpu", sa.Float(), nullable=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("model_version", sa.Text(), nullable=False),
        sa.Column("calibration_id", sa.Text(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_plans"),
    )
    op.create_index("ix_plans_created_at_id", "plans", ["created_at", "id"])
    op.create_index("ix_plans_job_hash", "plans", ["job_hash"])
    op.create_table(
        "plan_layouts",
        sa.Column("plan_id", sa.String(64), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("layout", sa.JSON(), nullable=False),
        sa.Column("num_gpus", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("step_seconds", sa.Float(), nullable=True),
        sa.Column("tokens_per_second_per_gpu", sa.Float(), nullable=True),
        sa.Column("peak_allocated_bytes", sa.Float(), nullable=True),
        sa.Column("peak_reserved_bytes", sa.Float(), nullable=True),
        sa.Column("device_bytes", sa.Float(), nullable=True),
        sa.Column("oom_probability", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["plan_id"], ["plans.id"], name="fk_plan_layouts_plan_id_plans", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("plan_id", "rank", name="pk_plan_layouts"),
    )
    op.create_table(
        "estimates",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("job_hash", sa.String(64), nullable=False),
        sa.Column("job", sa.JSON(), nullable=False),
        sa.Column("estimate", sa.JSON(), nullable=False),
        sa.Column("model_version", sa.Text(), nullable=False),
        sa.Column("calibration_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_estimates"),
    )
    op.create_index("ix_estimates_job_hash", "estimates", ["job_hash"])
    op.create_table(
        "idempotency_keys",
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("headers", sa.JSON(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("key_hash", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"])


def downgrade() -> None:
    for table in ("idempotency_keys", "estimates", "plan_layouts", "plans"):
        op.drop_table(table)
