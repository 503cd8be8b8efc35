"""What was learnt before the step times of a stack changed counts no more

Revision: 0009, after 0008.
"""

import sqlalchemy as sa

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "drift_findings",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=True),
        sa.Column("sweep_id", sa.String(64), nullable=False),
        sa.Column("trainer", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("software_hash", sa.String(64), nullable=False),
        sa.Column("job_hash", sa.String(64), nullable=True),
        sa.Column("layout_hash", sa.String(64), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("statement", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["sweep_id"], ["sweeps.id"], name="fk_drift_findings_sweep_id_sweeps"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_drift_findings"),
    )
    op.create_index("ix_drift_findings_gpu_trainer", "drift_findings", ["gpu", "trainer"])
    op.create_index("ix_drift_findings_sweep_id", "drift_findings", ["sweep_id"])


def downgrade() -> None:
    op.drop_table("drift_findings")
