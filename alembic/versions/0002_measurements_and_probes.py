"""Measurements, and probes as a queue with leases

Revision: 0002, after 0001.
"""

import sqlalchemy as sa

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "measurements",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("job_hash", sa.String(64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("num_gpus", sa.Integer(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("layout_hash", sa.String(64), nullable=False),
        sa.Column("software_hash", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("rung", sa.String(16), nullable=False),
        sa.Column("step_seconds", sa.Float(), nullable=True),
        sa.Column("tokens_per_second_per_gpu", sa.Float(), nullable=True),
        sa.Column("peak_allocated_bytes", sa.Float(), nullable=True),
        sa.Column("peak_reserved_bytes", sa.Float(), nullable=True),
        sa.Column("device_bytes", sa.Float(), nullable=True),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_measurements"),
    )
    op.create_index("ix_measurements_created_at_id", "measurements", ["created_at", "id"])
    op.create_index(
        "ix_measurements_key", "measurements", ["model", "gpu", "software_hash", "layout_hash"]
    )
    op.create_index("ix_measurements_job_hash", "measurements", ["job_hash"])
    op.create_table(
        "probes",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("job_hash", sa.String(64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("num_gpus", sa.Integer(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("plan_id", sa.String(64), nullable=True),
        sa.Column("plan_rank", sa.Integer(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("fencing_token", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", MOMENT, nullable=True),
        sa.Column("lease_until", MOMENT, nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=True),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("started_at", MOMENT, nullable=True),
        sa.Column("finished_at", MOMENT, nullable=True),
        sa.Column("results", sa.JSON(), nullable=False),
        sa.Column("measurement_id", sa.String(64), nullable=True),
        sa.Column("failure", sa.String(32), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["measurement_id"], ["measurements.id"], name="fk_probes_measurement_id_measurements"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_probes"),
    )
    op.create_index("ix_probes_created_at_id", "probes", ["created_at", "id"])
    op.create_index("ix_probes_state_created_at", "probes", ["state", "created_at"])
    op.create_index("ix_probes_job_hash", "probes", ["job_hash"])
    op.create_index("ix_probes_plan_id", "probes", ["plan_id"])


def downgrade() -> None:
    for table in ("probes", "measurements"):
        op.drop_table(table)
